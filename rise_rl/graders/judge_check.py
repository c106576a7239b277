"""How far to trust a judge: its verdicts on a file that people have labelled."""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from ..data.example import DataError, FieldError
from ..data.fields import as_list, as_messages, as_object, as_text
from ..data.reading import read_rows
from ..rubric import Criterion, Verdict, as_verdict
from .base import GradeItem, Grader
from .llm import LlmGrader

SHOWN = 5
"""Disagreements that `as_lines` shows."""


@dataclass(frozen=True)
class Disagreement:
    """A row (counted from 1) whose first known verdict is not its label."""

    row: int
    criterion: str
    label: float
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class JudgeCheck:
    """A judge over a labelled file. None: there was nothing to compute it from.

    rows: judged. tied: rows left out because their labels are a draw. repeats: times that every row was judged.
    agreement: mean of 1 - |verdict - label| over all known verdicts; for met / not met, the share that is right.
    unknown_rate: share of unknown verdicts. stability: share of rows with the same known verdict at every repeat.
    macro_f1, kappa: over known verdicts, if all of them and all labels are met or not met; macro_f1 is the mean of
    the F1 of "met" and of "not met", as in HealthBench's meta-evaluation. confusion: {(label, verdict): count},
    likewise. stats: the judge's counters, if it keeps any.
    """

    rows: int
    tied: int
    repeats: int
    agreement: float | None
    unknown_rate: float
    stability: float | None
    macro_f1: float | None
    kappa: float | None
    confusion: Mapping[tuple[float, float], int]
    disagreements: tuple[Disagreement, ...]
    stats: Mapping[str, Any]


def judge_check(path: str | PathLike[str], grader: Grader, *, repeats: int = 3) -> JudgeCheck:
    """Judges every labelled row `repeats` times. An LlmGrader asks anew each time, its cache notwithstanding.

    A row: `messages` or `prompt`; `response` or `completion`; `criterion` or `rubric`; optionally `bands`; and
    `label`, or `labels` or `binary_labels` of several people, of which the majority counts. A label is true or false,
    "met" or "not_met", or a number from 0 to 1. Raises DataError naming file, row and field, and ValueError.
    """
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1, found {repeats}")
    labelled, tied = _read(fspath(path))
    items = [item for _, item, _ in labelled]
    runs: list[list[Verdict]] = []
    for repeat in range(repeats):
        graded = grader.grade(items, repeat=repeat) if isinstance(grader, LlmGrader) else grader.grade(items)
        runs.append([verdicts[0] for verdicts in graded])
    outcomes = [tuple(run[i] for run in runs) for i in range(len(items))]
    labels = [label for _, _, label in labelled]
    known = [(label, v) for label, row in zip(labels, outcomes) for v in row if v is not None]
    binary = bool(known) and all(x in (0.0, 1.0) for pair in known for x in pair)
    confusion = Counter(known) if binary else Counter[tuple[float, float]]()
    return JudgeCheck(
        rows=len(items),
        tied=tied,
        repeats=repeats,
        agreement=statistics.fmean(1.0 - abs(label - v) for label, v in known) if known else None,
        unknown_rate=1.0 - len(known) / (len(items) * repeats),
        stability=sum(row[0] is not None and len(set(row)) == 1 for row in outcomes) / len(items)
        if repeats > 1
        else None,
        macro_f1=_macro_f1(confusion) if binary else None,
        kappa=_kappa(confusion) if binary else None,
        confusion=dict(confusion),
        disagreements=tuple(
            Disagreement(number, item.criteria[0].text, label, row)
            for (number, item, label), row in zip(labelled, outcomes)
            if next((v for v in row if v is not None), label) != label
        ),
        stats=grader.stats.summary() if isinstance(grader, LlmGrader) else {},
    )


def _read(source: str) -> tuple[list[tuple[int, GradeItem, float]], int]:
    """(row number, item, label) of each row, and the number of draws left out."""
    labelled, tied = [], 0
    for number, row in read_rows(source):
        try:
            if isinstance(row, FieldError):
                raise row
            label = _label(as_object(row, ""))
            item = _item(row, f"row {number}")
        except FieldError as error:
            raise DataError(error.message, file=source, row=number, field=error.field) from None
        if label is None:
            tied += 1
        else:
            labelled.append((number, item, label))
    if not labelled:
        raise DataError(f"expected at least one labelled row, found none ({tied} are draws)", file=source)
    return labelled, tied


def _item(row: Mapping[str, Any], uid: str) -> GradeItem:
    messages = _one_of(row, "messages", "prompt")
    response, text = _one_of(row, "response", "completion"), _one_of(row, "criterion", "rubric")
    if not isinstance(row[response], str):
        raise FieldError(response, f"expected text, found {row[response]!r}")
    tags = {"bands": as_object(row["bands"], "bands")} if row.get("bands") else {}
    criterion = Criterion(as_text(row[text], text), 1.0, tags)
    return GradeItem(uid, as_messages(row[messages], messages), row[response], [criterion])


def _label(row: Mapping[str, Any]) -> float | None:
    """None: several labels, none of them in the majority."""
    field = _one_of(row, "label", "labels", "binary_labels")
    given = [row[field]] if field == "label" else as_list(row[field], field)
    values = []
    for value in given:
        try:
            values.append(as_verdict(value))
        except (ValueError, TypeError):
            values.append(None)
        if values[-1] is None:
            raise FieldError(field, f'expected true, false, "met", "not_met" or a number from 0 to 1, found {value!r}')
    value, count = Counter(values).most_common(1)[0]
    return value if count * 2 > len(values) else None


def _one_of(row: Mapping[str, Any], *names: str) -> str:
    present = [name for name in names if row.get(name) is not None]
    if len(present) != 1:
        raise FieldError(names[0], f"expected one of {', '.join(names)}, found {', '.join(present) or 'none'}")
    return present[0]


def _macro_f1(confusion: Mapping[tuple[float, float], int]) -> float:
    scores = []
    for wanted in (1.0, 0.0):
        hits = confusion.get((wanted, wanted), 0)
        said = sum(n for (_, verdict), n in confusion.items() if verdict == wanted)
        there = sum(n for (label, _), n in confusion.items() if label == wanted)
        scores.append(2 * hits / (said + there) if said + there else 0.0)
    return statistics.fmean(scores)


def _kappa(confusion: Mapping[tuple[float, float], int]) -> float | None:
    """Cohen's kappa; None if labels and verdicts leave nothing to chance (both constant and equal)."""
    total = sum(confusion.values())
    observed = sum(n for (label, verdict), n in confusion.items() if label == verdict) / total
    chance = (
        sum(
            sum(n for (label, _), n in confusion.items() if label == x)
            * sum(n for (_, verdict), n in confusion.items() if verdict == x)
            for x in (0.0, 1.0)
        )
        / total**2
    )
    return (observed - chance) / (1.0 - chance) if chance < 1.0 else None


def as_lines(check: JudgeCheck) -> Sequence[str]:
    """The result for people, a line each: the figures, the confusion, the cost, and the first disagreements."""

    def share(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.1%}"

    def value(verdict: Verdict) -> str:
        return "unknown" if verdict is None else {1.0: "met", 0.0: "not met"}.get(verdict, f"{verdict:.2f}")

    lines = [
        f"{check.rows} labelled rows, judged {check.repeats} times"
        + (f"; {check.tied} draws left out" if check.tied else ""),
        f"agreement     {share(check.agreement)}",
        f"unknown       {share(check.unknown_rate)}",
        f"stability     {share(check.stability)}",
    ]
    if check.macro_f1 is not None:
        lines.append(f"macro F1      {check.macro_f1:.3f}")
    if check.kappa is not None:
        lines.append(f"Cohen's kappa {check.kappa:.3f}")
    for label in sorted({label for label, _ in check.confusion}, reverse=True):
        counts = ", ".join(f"{check.confusion.get((label, v), 0)} {value(v)}" for v in (1.0, 0.0))
        lines.append(f"{f'labelled {value(label)}:':<18}judged {counts}")
    if check.stats:
        s, latency = check.stats, check.stats["latency_p50_s"]
        lines.append(
            f"cost          {s['calls']} calls ({s['cache_hits']} verdicts from the cache), "
            f"{s['prompt_tokens']} tokens in, {s['completion_tokens']} out"
            + ("" if latency is None else f", median {latency:.2f} s a call")
        )
    if check.disagreements:
        lines.append(
            f"{len(check.disagreements)} rows judged against their label"
            + (f", the first {SHOWN}:" if len(check.disagreements) > SHOWN else ":")
        )
    for d in check.disagreements[:SHOWN]:
        judged, criterion = ", ".join(map(value, d.verdicts)), textwrap.shorten(d.criterion, 100, placeholder="...")
        lines.append(f"  row {d.row}: labelled {value(d.label)}, judged {judged}: {criterion}")
    return lines
