"""How long each phase of a step took."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


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
