"""What is in a data file, and every bad row with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from statistics import median

from ..graders.base import Message
from ..graders.routing import route
from .example import DataError, Example
from .load import iter_examples

CountTokens = Callable[[Sequence[Message]], int]


@dataclass(frozen=True)
class PromptLength:
    uid: str
    characters: int
    tokens: int | None


@dataclass
class DataReport:
    """`prompts` are all good rows', longest first (by tokens where they were counted, else characters)."""

    source: str
    rows: int = 0
    bad: list[DataError] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    domains: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    not_ending_with_user: int = 0
    prompts: list[PromptLength] = field(default_factory=list)
    max_prompt_tokens: int | None = None

    @property
    def negative_share(self) -> float:
        """Of the criteria; 0 where there are none."""
        return sum(w < 0 for w in self.weights) / len(self.weights) if self.weights else 0.0

    @property
    def too_long(self) -> list[PromptLength]:
        limit = self.max_prompt_tokens
        return [p for p in self.prompts if limit is not None and p.tokens is not None and p.tokens > limit]

    def text(self) -> str:
        """A summary for people, bad rows last."""
        good = self.rows - len(self.bad)
        parts = [f"{self.source}: {self.rows} rows, {good} good, {len(self.bad)} bad"]
        if good:
            w = self.weights
            spread = f"weights {min(w):g} to {max(w):g}, median {median(w):g}, {self.negative_share:.0%} negative"
            parts += [
                f"formats: {_tally(self.formats)}",
                f"domains: {_tally(self.domains)}",
                f"criteria: {len(w)} ({len(w) / good:.1f} a row); {spread}",
                f"routes: {_tally(self.routes)}",
            ]
            if self.checks:
                parts.append(f"checks: {_tally(self.checks)}")
            longest = self.prompts[0]
            tokens = "" if longest.tokens is None else f", {longest.tokens} tokens"
            parts.append(f"longest prompt: {longest.characters} characters{tokens} ({longest.uid})")
        if self.too_long:
            named = ", ".join(f"{p.uid} ({p.tokens})" for p in self.too_long[:5])
            parts.append(f"prompts over {self.max_prompt_tokens} tokens: {len(self.too_long)}, such as {named}")
        if self.repeated:
            parts.append(f"rows that repeat an earlier id or content: {self.repeated}")
        if self.not_ending_with_user:
            parts.append(f"conversations whose last message is not the user's: {self.not_ending_with_user}")
        reasons: dict[str, list[int]] = {}
        for error in self.bad:
            reasons.setdefault(f"{error.field}: {error.message}" if error.field else error.message, []).append(
                error.row or 0
            )
        for reason, rows in reasons.items():
            parts.append(f"bad {'rows' if len(rows) > 1 else 'row'} {_ranges(rows)}: {reason}")
        return "\n".join(parts)


def data_report(
    source: str | PathLike[str], count_tokens: CountTokens | None = None, max_prompt_tokens: int | None = None
) -> DataReport:
    """count_tokens: messages -> length of the rendered prompt in tokens. Raises DataError if nothing can be read."""
    report = DataReport(fspath(source), max_prompt_tokens=max_prompt_tokens)
    for entry in iter_examples(source):
        report.rows += 1
        if isinstance(entry, DataError):
            report.bad.append(entry)
        else:
            _add(report, entry, count_tokens)
    report.prompts.sort(key=lambda p: (p.tokens or 0, p.characters), reverse=True)
    return report


def _add(report: DataReport, example: Example, count_tokens: CountTokens | None) -> None:
    report.formats[example.meta["format"]] += 1
    report.domains[example.domain or "(none)"] += 1
    report.repeated += "copy_of" in example.meta
    report.not_ending_with_user += example.messages[-1]["role"] != "user"
    for criterion in example.rubric.criteria:
        report.weights.append(criterion.weight)
        report.routes[route(criterion)] += 1
        if route(criterion) == "rule":
            report.checks[criterion.tags["function"]] += 1
    characters = sum(len(message["content"]) for message in example.messages)
    tokens = count_tokens(example.messages) if count_tokens else None
    report.prompts.append(PromptLength(example.uid, characters, tokens))


def _tally(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def _ranges(rows: list[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"; rows are in ascending order."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][-1] + 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
