"""RuscaRL's rubric scaffolding: natural rollouts are shown criteria, fewer down the group and fewer with time.

Source: "Breaking the Exploration Bottleneck: Rubric-Scaffolded Reinforcement Learning" (RuscaRL). docs/baselines.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from rise_engine.seeds import derive_seed

from .guidance import criterion_text
from .rubric import Rubric

INTRODUCTION = "A good answer to this conversation meets these criteria:"


def strength(step: int, steps: int, *, steepness: float, midpoint: float) -> float:
    """lambda(s) = 1 / (1 + exp(steepness (x - midpoint))) with x = (s - 1) / (S - 1): near 1 at first, then near 0.

    step: s, counted from 1. steps: S, at least 2.
    """
    x = (step - 1) / (steps - 1)
    return 1.0 / (1.0 + math.exp(min(steepness * (x - midpoint), 700.0)))


def shown_count(criteria: int, strength: float, index: int, group_size: int) -> int:
    """round(K lambda (G - 1 - i) / (G - 1)): how many of K criteria rollout i of a group of G is shown."""
    return round(criteria * strength * (group_size - 1 - index) / (group_size - 1))


def draw_criteria(rubric: Rubric, count: int, *, seed: int, step: int, uid: str, index: int) -> list[int]:
    """`count` criteria without replacement, a pure function of (seed, step, uid, index), in the order drawn."""
    return random.Random(derive_seed("scaffold", seed, step, uid, index)).sample(range(len(rubric)), count)


def scaffolded(messages: Sequence[Mapping[str, str]], rubric: Rubric, chosen: Sequence[int]) -> list[dict[str, str]]:
    """The conversation under a system message that lists the chosen criteria in rubric order; a system message that is
    there already comes first in it. Nothing chosen: the conversation as it is.
    """
    conversation = [dict(m) for m in messages]
    if not chosen:
        return conversation
    lines = [INTRODUCTION, *(f"- {criterion_text(rubric.criteria[k])}" for k in sorted(chosen))]
    text = "\n".join(lines)
    if conversation[0]["role"] == "system":
        conversation[0]["content"] = f"{conversation[0]['content']}\n\n{text}"
        return conversation
    return [{"role": "system", "content": text}, *conversation]
