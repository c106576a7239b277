"""What one optimizer step is made of: sequences with their token weights already worked out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainSequence:
    """One response under one prompt, as sampled; for a guide row the prompt is the original one, without the hint.

    token_weight: the weight of every token of the response, all normalisers inside (nothing later divides).
    advantage: of a row of the policy loss; guide rows use token_weight alone. coupled: a guided answer that is learnt
    with the policy loss; it counts among neither the natural nor the guide tokens of the statistics.
    old_logprob, ref_logprob, behaviour_logprob: one value per response token, or None. old_logprob None: the policy's
    own, so that the ratio is 1. behaviour_logprob (the rollout engine's) is always used for the log-prob gap, and for
    importance correction where the loss asks for it.
    """

    uid: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    token_weight: float
    advantage: float = 0.0
    is_guide: bool = False
    coupled: bool = False
    old_logprob: Sequence[float] | None = None
    behaviour_logprob: Sequence[float] | None = None
    ref_logprob: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"sequence {self.uid!r}: prompt_ids is empty; the first token needs something before it")
        if not self.response_ids:
            raise ValueError(f"sequence {self.uid!r}: response_ids is empty")
        for name in ("old_logprob", "behaviour_logprob", "ref_logprob"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.response_ids):
                raise ValueError(
                    f"sequence {self.uid!r}: {name} has {len(values)} values for {len(self.response_ids)} tokens"
                )

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class StepStats:
    """What one `train_step` did, or several (`merge`). Means are over the tokens forwarded; NaN where there were none.

    loss = policy_loss + guide_loss, the weighted sums over all ranks. grad_norm: before clipping; 0 if the step was
    skipped. lr: the rate the update used. tokens: response tokens forwarded. clip_fraction, ratio_*, kl and entropy
    are over natural tokens (kl: NaN without a KL term), mean_support (rho) over guide tokens. logprob_gap_*:
    |trainer - behaviour| in nats with the weights that sampled, over the `gap_tokens` forwarded tokens that carry a
    behaviour log-prob. importance_kept: share of them whose importance factor is not truncated, NaN without token
    correction.
    """

    loss: float
    policy_loss: float
    guide_loss: float
    grad_norm: float
    lr: float
    tokens: int
    natural_tokens: int
    guide_tokens: int
    gap_tokens: int
    forwarded_sequences: int
    micro_batches: int
    skipped: bool
    clip_fraction: float
    mean_support: float
    entropy: float
    ratio_mean: float
    ratio_max: float
    kl: float
    logprob_gap_mean: float
    logprob_gap_p99: float
    logprob_gap_max: float
    importance_kept: float
    seconds: float


def merge(updates: Sequence[StepStats]) -> StepStats:
    """The statistics of a step of several optimizer updates.

    Losses and gradient norm: mean over the updates that were made (0 if all were skipped), so that they compare with
    those of a step of one update. lr: of the last. Token means: over all tokens. Counts and seconds: sums; maxima:
    maxima. logprob_gap_p99: the largest of the updates', which the 99th percentile of all tokens does not exceed.
    skipped: whether all were.
    """
    if not updates:
        raise ValueError("updates: expected the statistics of at least one, found none")
    if len(updates) == 1:
        return updates[0]
    made = [u for u in updates if not u.skipped]

    def total(name: str) -> Any:
        return sum(getattr(u, name) for u in updates)

    def per_update(name: str) -> float:
        return sum(getattr(u, name) for u in made) / max(1, len(made))

    def over(counts: Sequence[int], name: str) -> float:
        terms = [n * getattr(u, name) for n, u in zip(counts, updates) if n]
        return sum(terms) / sum(counts) if terms else math.nan

    def largest(name: str) -> float:
        return max((v for u in updates if not math.isnan(v := getattr(u, name))), default=math.nan)

    natural, guide = [u.natural_tokens for u in updates], [u.guide_tokens for u in updates]
    return StepStats(
        loss=per_update("loss"),
        policy_loss=per_update("policy_loss"),
        guide_loss=per_update("guide_loss"),
        grad_norm=per_update("grad_norm"),
        lr=updates[-1].lr,
        tokens=total("tokens"),
        natural_tokens=sum(natural),
        guide_tokens=sum(guide),
        gap_tokens=total("gap_tokens"),
        forwarded_sequences=total("forwarded_sequences"),
        micro_batches=total("micro_batches"),
        skipped=not made,
        clip_fraction=over(natural, "clip_fraction"),
        mean_support=over(guide, "mean_support"),
        entropy=over(natural, "entropy"),
        ratio_mean=over(natural, "ratio_mean"),
        ratio_max=largest("ratio_max"),
        kl=over(natural, "kl"),
        logprob_gap_mean=over([u.gap_tokens for u in updates], "logprob_gap_mean"),
        logprob_gap_p99=largest("logprob_gap_p99"),
        logprob_gap_max=largest("logprob_gap_max"),
        importance_kept=over([u.gap_tokens for u in updates], "importance_kept"),
        seconds=total("seconds"),
    )
