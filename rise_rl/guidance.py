"""Guided rollouts: which criteria to show, how to show them, and which guided answers to keep (paper eq. 4-8)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rise_engine.seeds import derive_seed

from .advantages import FLAT_RANGE
from .rubric import Criterion, Rubric, VerdictLike, as_verdict

TEMPLATES: tuple[str, ...] = (
    "In your answer, pay attention to the following: {hint}.",
    "The following deserve attention in the answer: {hint}.",
    "Consider answering with these in mind: {hint}.",
    "These points may improve the answer: {hint}.",
    "Please let the answer reflect these points: {hint}.",
)
SECRECY_WISH = "Do not mention these points themselves in the answer."


def priorities(rubric: Rubric, verdicts: Sequence[Sequence[VerdictLike]]) -> list[float]:
    """p_k = w_k * misses of criterion k over the natural rollouts (eq. 4); for w_k < 0, |w_k| * times it was met.

    verdicts: one list per natural rollout, one verdict per criterion. A graded verdict z misses by 1 - z. A rollout
    with an unknown verdict is ungraded and counts nowhere.
    """
    missed = [0.0] * len(rubric)
    for row in verdicts:
        if len(row) != len(rubric):
            raise ValueError(f"verdicts: expected {len(rubric)} per rollout, found {len(row)}")
        values = [value for verdict in row if (value := as_verdict(verdict)) is not None]
        if len(values) == len(rubric):
            for k, (criterion, value) in enumerate(zip(rubric.criteria, values)):
                missed[k] += 1.0 - value if criterion.weight > 0 else value
    return [abs(c.weight) * m for c, m in zip(rubric.criteria, missed)]


def select_feedback(rubric: Rubric, verdicts: Sequence[Sequence[VerdictLike]], m: int | Literal["all"]) -> list[int]:
    """Indices of the m criteria of highest positive priority (eq. 5); ties by larger |w|, then rubric order. "all":
    every criterion of positive priority.

    Empty when nothing is missed: then the prompt gets no guided rollouts.
    """
    if m != "all" and m < 1:
        raise ValueError(f"m: expected at least 1 criterion, found {m}")
    p = [round(value, 9) for value in priorities(rubric, verdicts)]  # 3 x 0.1 ties with 1 x 0.3
    ranked = sorted(range(len(p)), key=lambda k: (-p[k], -abs(rubric.criteria[k].weight), k))
    return [k for k in ranked[: None if m == "all" else m] if p[k] > 0]


def guided_gains(
    guided_rewards: Sequence[float | None], natural_rewards: Sequence[float | None], a_max: float = 1.0
) -> list[float]:
    """clip(r_priv - mean(r_nat), 0, a_max) for each guided sample (eq. 7, 8): 0 means filtered out.

    Rewards are the complete-rubric rewards, without the length penalty. None is an ungraded sample: a guided one
    gets 0, a natural one leaves the mean. Without a graded natural sample there is no baseline and every gain is 0. A
    gain below 1e-8 is what rounding leaves of a reward equal to the mean: 0, or it would count in |O_ref|.
    """
    graded = [r for r in natural_rewards if r is not None]
    if not graded:
        return [0.0] * len(guided_rewards)
    baseline = statistics.fmean(graded)
    return [0.0 if r is None or r - baseline < FLAT_RANGE else min(r - baseline, a_max) for r in guided_rewards]


@dataclass(frozen=True)
class GuidedPrompt:
    """The conversation shown for one guided rollout, and the criteria it names. `shown` may be shorter than asked."""

    messages: list[dict[str, str]]
    shown: tuple[int, ...]


def hint_text(rubric: Rubric, chosen: Sequence[int]) -> str:
    """The chosen criteria joined by semicolons; a negative criterion enters as "avoid: ..."."""
    return "; ".join(criterion_text(rubric.criteria[k]) for k in chosen)


def criterion_text(criterion: Criterion) -> str:
    """A criterion as a policy is shown it."""
    text = criterion.text.strip().rstrip(".;")
    return text if criterion.weight > 0 else f"avoid: {text}"


def add_hint(messages: Sequence[Mapping[str, str]], hint: str) -> list[dict[str, str]]:
    """Appends the hint to the last user message, which otherwise stays as it is. ValueError without a user message."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise ValueError("messages: expected at least one user message to carry the guidance, found none")
    guided = [dict(message) for message in messages]
    guided[last]["content"] = f"{guided[last]['content']}\n\n{hint}"
    return guided


def guided_prompt(
    messages: Sequence[Mapping[str, str]],
    rubric: Rubric,
    chosen: Sequence[int],
    *,
    template: str,
    secrecy_wish: bool = False,
    fits: Callable[[list[dict[str, str]]], bool] = lambda _: True,
) -> GuidedPrompt | None:
    """The privileged prompt (eq. 6). Drops the lowest priorities until `fits`; None when not even one criterion does.

    chosen: criterion indices, highest priority first. fits: whether the conversation is within the token budget.
    """
    for count in range(len(chosen), 0, -1):
        hint = template.replace("{hint}", hint_text(rubric, chosen[:count]))
        guided = add_hint(messages, f"{hint} {SECRECY_WISH}" if secrecy_wish else hint)
        if fits(guided):
            return GuidedPrompt(guided, tuple(chosen[:count]))
    return None


def draw_template(templates: Sequence[str], *, seed: int, step: int, uid: str, index: int) -> str:
    """One template per guided rollout, a pure function of (seed, step, uid, index)."""
    return templates[derive_seed("template", seed, step, uid, index) % len(templates)]
