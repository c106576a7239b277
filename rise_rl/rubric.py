"""Rubrics: weighted criteria per prompt, and the reward that verdicts on them add up to (paper eq. 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Verdict = float | None
"""A criterion's fulfilment in [0, 1]; None: unknown, the grader could not judge it."""

VerdictLike = float | int | bool | str | None

_WORDS: dict[str, Verdict] = {"met": 1.0, "not_met": 0.0, "unknown": None}


def as_verdict(value: VerdictLike) -> Verdict:
    """Accepts a number in [0, 1], "met", "not_met", "unknown" or None. Raises ValueError for anything else."""
    if value is None:
        return None
    if isinstance(value, str):
        if value in _WORDS:
            return _WORDS[value]
    elif 0.0 <= value <= 1.0:
        return float(value)
    raise ValueError(f'verdict: expected a number in [0, 1], "met", "not_met", "unknown" or None, found {value!r}')


@dataclass(frozen=True)
class Criterion:
    """One thing a good answer does (weight > 0) or avoids (weight < 0).

    tags: whatever the data set says about it; `verifier`, `function` and `parameters` route it to a grader.
    """

    text: str
    weight: float
    tags: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError("criterion text: expected a non-empty string")
        if not math.isfinite(self.weight):
            raise ValueError(f"criterion weight: expected a finite number, found {self.weight!r} for {self.text!r}")


@dataclass(frozen=True)
class Rubric:
    """The criteria of one prompt. At least one weight is positive, or no answer could earn anything."""

    criteria: tuple[Criterion, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "criteria", tuple(self.criteria))
        if self.positive_weight <= 0:
            raise ValueError(f"rubric: expected at least one criterion of positive weight among {len(self)}")

    def __len__(self) -> int:
        return len(self.criteria)

    @property
    def positive_weight(self) -> float:
        return sum(c.weight for c in self.criteria if c.weight > 0)

    def score(self, verdicts: Sequence[VerdictLike]) -> float | None:
        """sum_k w_k z_k / sum_{w_k > 0} w_k, unclipped (HealthBench's own score); None if a verdict is unknown."""
        if len(verdicts) != len(self):
            raise ValueError(f"verdicts: expected one for each of {len(self)} criteria, found {len(verdicts)}")
        values = [as_verdict(v) for v in verdicts]
        if any(v is None for v in values):
            return None
        return sum(c.weight * v for c, v in zip(self.criteria, values) if v is not None) / self.positive_weight

    def reward(self, verdicts: Sequence[VerdictLike]) -> float | None:
        """The training reward: the score clipped to [0, 1]. None (ungraded) if any verdict is unknown."""
        score = self.score(verdicts)
        return None if score is None else min(max(score, 0.0), 1.0)
