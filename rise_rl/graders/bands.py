"""Criteria scored 1-10 in described bands (WritingBench): a score becomes a graded verdict in [0, 1]."""

from __future__ import annotations

from ..rubric import Criterion

LOWEST, HIGHEST = 1, 10


def bands(criterion: Criterion) -> dict[str, str] | None:
    """{"1-2": what such an answer is like, ..., "9-10": ...}, or None for a criterion that is met or not met."""
    found = criterion.tags.get("bands")
    return dict(found) if found else None


def band_verdict(score: float) -> float:
    """(score - 1) / 9. Raises ValueError outside 1 to 10."""
    if not LOWEST <= score <= HIGHEST:
        raise ValueError(f"score: expected {LOWEST} to {HIGHEST}, found {score!r}")
    return (score - LOWEST) / (HIGHEST - LOWEST)
