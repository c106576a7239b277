"""The phases of a step, by the names of the metrics time/*, and how long each took."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = {
    "rollout": "natural rollouts",
    "guided_rollout": "guided rollouts",
    "grade": "grading",
    "train": "training",
    "sync": "weight sync",
    "evaluate": "held-out evaluation",
    "checkpoint": "checkpoints",
}
"""How a person is told of them."""


class PhaseTimes:
    """Wall-clock seconds by phase name, added up until `take`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """The seconds so far; counting starts anew."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds
