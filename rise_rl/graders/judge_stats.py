"""What judging cost and how it went."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, fields
from typing import Any

KEPT_LATENCIES = 10_000


@dataclass
class JudgeStats:
    """Counters since the grader was made.

    criteria: verdicts given. known: those that are a value. unknown: the others, by cause.
    cache_hits: answers found on disk (one per criterion and vote).
    calls: HTTP requests sent, retries and repeated questions included. retries: calls sent again after a failure of
    the transport. asked_again: calls that repeat a question whose answer could not be used. failed_calls: by cause.
    tokens: as the servers report them. latencies: seconds of the last 10,000 answered calls.
    """

    criteria: int = 0
    known: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    cache_hits: int = 0
    calls: int = 0
    answered: int = 0
    retries: int = 0
    asked_again: int = 0
    failed_calls: Counter[str] = field(default_factory=Counter)
    structured_fallbacks: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_LATENCIES))

    def latency(self, fraction: float) -> float | None:
        """The latency in seconds that this fraction of the answered calls did not exceed; None before the first."""
        ordered = sorted(self.latencies)
        return ordered[min(int(fraction * len(ordered)), len(ordered) - 1)] if ordered else None

    def summary(self) -> dict[str, Any]:
        """Plain numbers for a log: every counter, and the 50th, 95th and 99th percentile of latency."""
        counters = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "latencies"}
        plain = {name: dict(value) if isinstance(value, Counter) else value for name, value in counters.items()}
        return plain | {f"latency_p{p}_s": self.latency(p / 100) for p in (50, 95, 99)}
