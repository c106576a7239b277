"""The criterion-by-evaluation failure map of the fixed cohort, as in the paper's Fig. 5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Row:
    """A criterion: how many of the judged answers miss it, per evaluation (None: none was judged)."""

    topic: str
    text: str
    weight: float
    prompts: set[str] = field(default_factory=set)
    failures: dict[int, float] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)

    def share(self, step: int) -> float | None:
        return self.failures[step] / self.samples[step] if self.samples.get(step) else None


def topic_share(rows: Sequence[Row], step: int) -> float | None:
    """Of all judged answers to the criteria of a topic."""
    judged = sum(r.samples.get(step, 0) for r in rows)
    return sum(r.failures.get(step, 0.0) for r in rows) / judged if judged else None


@dataclass(frozen=True)
class HeatMap:
    """steps: the evaluations, left to right. rows: criteria in rubric order, those of one topic together."""

    steps: list[int]
    rows: list[Row]
    left_out: int = 0

    def topics(self) -> list[tuple[str, list[Row]]]:
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.topic, []).append(row)
        return list(groups.items())

    def never_met(self, step: int) -> list[Row]:
        """The criteria that every judged answer of this evaluation misses."""
        return [row for row in self.rows if row.share(step) == 1]

    def woken(self, first: int, last: int) -> tuple[int, int]:
        """Of the criteria never met at evaluation `first` and judged at `last`: (how many are met there, how many)."""
        shares = [share for row in self.never_met(first) if (share := row.share(last)) is not None]
        return sum(share < 1 for share in shares), len(shares)

    def most_missed(self, limit: int) -> HeatMap:
        """At most `limit` rows: those of most |weight| times failures at the first evaluation, in the same order."""
        if len(self.rows) <= limit:
            return self
        first = self.steps[0]
        ranked = sorted(range(len(self.rows)), key=lambda i: -self._priority(self.rows[i], first))
        kept = sorted(ranked[:limit])
        return HeatMap(self.steps, [self.rows[i] for i in kept], len(self.rows) - limit)

    @staticmethod
    def _priority(row: Row, step: int) -> float:
        return abs(row.weight) * row.failures.get(step, 0.0)


def heat_map(evals: Sequence[dict[str, Any]]) -> HeatMap | None:
    """None if no evaluation has criteria. The same criterion of several prompts of a topic is one row, and evaluations
    of the same step (of several runs) are counted together.
    """
    evals = [e for e in evals if e.get("criteria")]
    rows: dict[tuple[str, str, float], Row] = {}
    for evaluation in evals:
        step = evaluation["step"]
        for entry in evaluation["criteria"]:
            topic = str(entry.get("topic") or "all prompts")
            row = rows.setdefault((topic, entry["text"], entry["weight"]), Row(topic, entry["text"], entry["weight"]))
            row.prompts.add(entry["uid"])
            row.failures[step] = row.failures.get(step, 0.0) + (entry["failures"] or 0.0)
            row.samples[step] = row.samples.get(step, 0) + entry["samples"]
    if not rows:
        return None
    topics = list(dict.fromkeys(row.topic for row in rows.values()))
    return HeatMap(sorted({e["step"] for e in evals}), sorted(rows.values(), key=lambda r: topics.index(r.topic)))
