"""A file of responses in, the same rows with verdicts, score and reward out; resumable, and written all or nothing."""

from __future__ import annotations

import fcntl
import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ..data import DataError, Example, load_examples
from ..data.example import FieldError
from ..data.reading import read_rows
from ..files import FileError, read_lines, write_aside
from .base import GradeItem, Grader
from .errors import GraderError
from .judge_cache import cache_key
from .routing import RoutingGrader

KEY = "grading"
"""Field of a graded row: a hash of all that its verdicts depend on."""


@dataclass(frozen=True)
class GradeSummary:
    """rows: all; reused: taken over from an earlier run; ungraded: those with an unknown verdict (reward null).

    reward, score: means over the graded rows, clipped and unclipped; None if there is none.
    """

    output: Path
    rows: int
    reused: int
    ungraded: int
    criteria: int
    unknown_verdicts: int
    reward: float | None
    score: float | None


@dataclass(frozen=True)
class _Response:
    row: Mapping[str, Any]
    example: Example
    key: str

    @property
    def item(self) -> GradeItem:
        return GradeItem(self.example.uid, self.example.messages, self.row["response"], self.example.rubric.criteria)


def grade_file(
    responses: str | PathLike[str],
    rubrics: str | PathLike[str] | Sequence[Example],
    output: str | PathLike[str],
    grader: Grader,
    *,
    chunk_rows: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> GradeSummary:
    """Grades every row of `responses` (fields `uid` and `response`) on the rubric of its uid in `rubrics`.

    output: JSON lines in the order of `responses`, with `verdicts`, `score`, `reward` (null: ungraded) and `grading`
    added. It appears at the end, in one step. Finished chunks stay in <output>.partial, so that the same command goes
    on after a stop; rows in either file are taken over if nothing changed that their verdicts depend on and all of
    them are known. progress: called with rows done and rows in all. Raises DataError and GraderError.
    """
    output = Path(output)
    examples = load_examples(rubrics) if isinstance(rubrics, (str, PathLike)) else rubrics
    rows = _read(fspath(responses), {example.uid: example for example in examples}, grader_identity(grader))
    if output.exists() and output.samefile(responses):
        raise GraderError(f"{output}: would overwrite the responses; name another output file")
    partial = output.with_name(output.name + ".partial")
    with _locked(partial) as file:
        graded = _known(output) | _known(partial)
        reused = sum(row.key in graded for row in rows)
        todo = list({row.key: row for row in rows if row.key not in graded}.values())
        _end_last_line(file)
        for start in range(0, len(todo), chunk_rows):
            if progress:
                progress(len(rows) - len(todo) + start, len(rows))
            chunk = todo[start : start + chunk_rows]
            for row, verdicts in zip(chunk, grader.grade([row.item for row in chunk]), strict=True):
                rubric = row.example.rubric
                graded[row.key] = {
                    "verdicts": verdicts,
                    "score": rubric.score(verdicts),
                    "reward": rubric.reward(verdicts),
                    KEY: row.key,
                }
                file.write(json.dumps(graded[row.key]).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if progress:
            progress(len(rows), len(rows))
        results = [graded[row.key] for row in rows]
        graded_rows = ({**row.row, **result} for row, result in zip(rows, results))
        write_aside(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in graded_rows))
        partial.unlink(missing_ok=True)
    return _summary(output, results, reused)


def grader_identity(grader: Grader) -> str:
    """What tells its verdicts from another grader's: its `identity` if it has one, else the name of its class."""
    if isinstance(grader, RoutingGrader):
        return "+".join(f"{route}={grader_identity(g)}" for route, g in sorted(grader.graders.items()))
    name = f"{type(grader).__module__}.{type(grader).__qualname__}"
    return str(getattr(grader, "identity", name))


def _read(source: str, examples: Mapping[str, Example], identity: str) -> list[_Response]:
    rows = []
    for number, row in read_rows(source):
        if isinstance(row, FieldError):
            raise DataError(row.message, file=source, row=number, field=row.field)
        if not isinstance(row, Mapping):
            raise DataError(f"expected an object, found {type(row).__name__}", file=source, row=number)
        for field in ("uid", "response"):
            if not isinstance(row.get(field), str):
                raise DataError(f"expected text, found {row.get(field)!r}", file=source, row=number, field=field)
        example = examples.get(row["uid"])
        if example is None:
            raise DataError(f"no rubric has the uid {row['uid']!r}", file=source, row=number, field="uid")
        criteria = [[c.text, c.weight, dict(c.tags)] for c in example.rubric.criteria]
        messages = [dict(message) for message in example.messages]
        key = cache_key(grader=identity, messages=messages, response=row["response"], criteria=criteria)
        rows.append(_Response(row, example, key))
    if not rows:
        raise DataError("expected at least one row, found none", file=source)
    return rows


def _known(path: Path) -> dict[str, dict[str, Any]]:
    """Results that need no second look, by key. Raises GraderError for a file that is not of our making."""
    known = {}
    try:
        lines = read_lines(path)
    except FileError as error:
        raise GraderError(f"{error}; name another output file, or remove it") from error
    for line in lines:
        if not isinstance(line, dict) or KEY not in line:
            raise GraderError(f"{path}: exists and holds no graded rows; name another output file, or remove it")
        if line["reward"] is not None:
            known[line[KEY]] = {name: line[name] for name in ("verdicts", "score", "reward", KEY)}
    return known


@contextmanager
def _locked(partial: Path) -> Iterator[Any]:
    """The partial file, open for appending; one process at a time."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GraderError(f"{partial}: another process is grading into it") from None
        try:
            yield file
        finally:
            if os.fstat(file.fileno()).st_size == 0:
                partial.unlink(missing_ok=True)


def _end_last_line(file: Any) -> None:
    """Cuts off a last line that a kill left without its end."""
    file.seek(0)
    whole = file.read().rpartition(b"\n")
    file.truncate(len(whole[0]) + len(whole[1]))


def _summary(output: Path, results: Sequence[Mapping[str, Any]], reused: int) -> GradeSummary:
    rewards = [r["reward"] for r in results if r["reward"] is not None]
    scores = [r["score"] for r in results if r["score"] is not None]
    verdicts = [v for r in results for v in r["verdicts"]]
    return GradeSummary(
        output=output,
        rows=len(results),
        reused=reused,
        ungraded=len(results) - len(rewards),
        criteria=len(verdicts),
        unknown_verdicts=sum(v is None for v in verdicts),
        reward=statistics.fmean(rewards) if rewards else None,
        score=statistics.fmean(scores) if scores else None,
    )
