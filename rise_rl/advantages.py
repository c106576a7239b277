"""GRPO's group-relative advantages (paper eq. 1) and the length penalty on the shaped reward."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

FLAT_RANGE = 1e-8
"""Rewards closer together than this carry no preference: what is left of them is rounding."""


def group_advantages(rewards: Sequence[float | None], uids: Sequence[str], eps: float = 1e-6) -> list[float | None]:
    """A_i = (r_i - mean) / (std + eps) over the samples of one prompt uid, std with ddof = 1 (as verl and TRL).

    rewards, uids: one per sample, in any order. A reward of None is an ungraded sample: it gets None and counts in
    no mean. Exactly 0 for a group whose rewards span less than 1e-8 or that has fewer than two graded samples.
    """
    if len(rewards) != len(uids):
        raise ValueError(f"uids: expected one per reward ({len(rewards)}), found {len(uids)}")
    groups: dict[str, list[float]] = defaultdict(list)
    for reward, uid in zip(rewards, uids):
        if reward is not None:
            groups[uid].append(reward)

    def scale(group: list[float]) -> tuple[float, float]:
        if len(group) < 2 or max(group) - min(group) < FLAT_RANGE:
            return 0.0, 0.0
        return statistics.fmean(group), 1.0 / (statistics.stdev(group) + eps)

    scales = {uid: scale(group) for uid, group in groups.items()}
    return [None if r is None else (r - scales[u][0]) * scales[u][1] for r, u in zip(rewards, uids)]


def overlong_penalty(length: int, *, max_length: int, buffer: int, factor: float) -> float:
    """0 up to max_length - buffer tokens, then falling linearly to -factor at max_length (DAPO's soft punishment).

    length: tokens of the response. Paper: max_length 8192, buffer 4096, factor 0.5. A buffer of 0 means no penalty.
    """
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer: expected 0 <= buffer <= max_length ({max_length}), found {buffer}")
    excess = length - (max_length - buffer)
    return -factor * excess / buffer if buffer and excess > 0 else 0.0
