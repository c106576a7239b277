"""A judge's answer to verdicts: tolerant of how it is written, never guessing what it says.

The rule is one sentence: every statement of a verdict in the answer must say the same, or the verdict is unknown.
Reasoning blocks are not the answer, and a JSON object or line that the judge copied from the graded response is not
the judge's. An answer that the server cut short (`truncated`) may have been about to say more, so only an object that
was closed states a verdict there. Causes of an unknown: "empty", "unparseable", "ambiguous", "truncated",
"judge_unknown" (the judge said so itself).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..rubric import Verdict
from .bands import HIGHEST, LOWEST, band_verdict
from .loose_json import Found, Pairs, Unreadable, find_objects

VERDICT_KEYS = frozenset(
    ["criteria_met", "criterion_met", "is_met", "met", "verdict", "judgment", "satisfied", "fulfilled", "passed"]
)
SCORE_KEYS = frozenset(["score", "rating", "grade"])
ID_KEYS = frozenset(["id", "criterion_id", "criteria_id", "index"])

_WORDS: dict[str, Verdict] = {
    **dict.fromkeys(["met", "true", "yes", "satisfied", "fulfilled", "pass", "passed", "1"], 1.0),
    **dict.fromkeys(
        ["not met", "unmet", "false", "no", "not satisfied", "unsatisfied", "not fulfilled", "fail", "failed", "0"], 0.0
    ),
}
_SAYS_UNKNOWN = frozenset(["unknown", "null", "none", "n/a", "unclear", "undetermined"])
_MARKUP = " \t\r\n*_`\"'.,;:!#>-“”‘’"

_THINK_END = re.compile(r"</(?:think|thinking|reasoning)>", re.IGNORECASE)
_THINK_START = re.compile(r"<(?:think|thinking|reasoning)>", re.IGNORECASE)
_FINAL_CHANNEL = re.compile(r"<\|channel\|>final[^<]{0,100}<\|message\|>")
_LINE = re.compile(
    r"^[ \t*_`#>-]*(?:final\s+)?([a-z][a-z _]{1,30}?)[ \t*_`]*[:=](.{1,60})$", re.IGNORECASE | re.MULTILINE
)
_QUOTED_KEY = re.compile(r"""["'“]([\w -]{1,40})["'”]\s*:""")


@dataclass(frozen=True)
class Reading:
    """What an answer says: a verdict, or None and the cause."""

    verdict: Verdict
    cause: str = ""


UNPARSEABLE = Reading(None, "unparseable")
AMBIGUOUS = Reading(None, "ambiguous")
TRUNCATED = Reading(None, "truncated")


def parse_verdict(
    text: str | None, *, reasoning: str | None = None, response: str = ""
) -> Literal["met", "not_met", "unknown"]:
    """What the judge's answer `text` says about one criterion.

    reasoning: the server's separate reasoning text, looked at only if `text` is empty, and only for an object that
    ends it. response: the graded response as the judge saw it; what the judge copied from there does not count.
    """
    verdict = read_verdict(text, reasoning=reasoning, response=response).verdict
    return "unknown" if verdict is None else "met" if verdict == 1.0 else "not_met"


def read_verdict(
    text: str | None, *, reasoning: str | None = None, response: str = "", truncated: bool = False
) -> Reading:
    """parse_verdict with the cause of an unknown. truncated: the server stopped the answer before its end."""
    return _read_one(text, reasoning, response, truncated, VERDICT_KEYS, _verdict_value)


def read_score(
    text: str | None, *, reasoning: str | None = None, response: str = "", truncated: bool = False
) -> Reading:
    """A score s from 1 to 10 as the verdict (s - 1) / 9; unknown if there is no single one in that range."""
    return _read_one(text, reasoning, response, truncated, SCORE_KEYS, _score_value)


def read_batch(
    text: str | None,
    count: int,
    *,
    scored: bool = False,
    reasoning: str | None = None,
    response: str = "",
    truncated: bool = False,
) -> list[Reading]:
    """What one answer says about each of the criteria 1..count. Ids that are missing or there twice are unknown, by
    the causes "missing_id" and "duplicate_id"; others' are passed over.
    """
    try:
        answer = _answer(text, reasoning)
        objects = _own_objects(answer, response)
    except Unreadable:
        return [UNPARSEABLE] * count
    if not answer:
        return [Reading(None, "empty")] * count
    keys, value_of = (SCORE_KEYS, _score_value) if scored else (VERDICT_KEYS, _verdict_value)
    entries = [entry for found in objects for entry in _entries(found.value)]
    whole = [entry for found in objects for part in _closed(found.value) for entry in _entries(part)]
    if not entries:
        return [UNPARSEABLE] * count
    if any(number == 0 for number, _ in entries):  # counted from zero: every number may mean its neighbour
        return [AMBIGUOUS] * count
    readings = []
    for number in range(1, count + 1):
        mine = [value for n, value in entries if n == number]
        if len(mine) != 1:
            readings.append(Reading(None, "duplicate_id" if mine else "missing_id"))
        elif truncated and number not in {n for n, _ in whole}:
            readings.append(TRUNCATED)
        elif isinstance(mine[0], Pairs):
            readings.append(_agree([value_of(v) for v in _statements(mine[0], keys)]))
        else:
            readings.append(value_of(mine[0]))
    return readings


def _read_one(
    text: str | None,
    reasoning: str | None,
    response: str,
    truncated: bool,
    keys: frozenset[str],
    value_of: Callable[[Any], Reading],
) -> Reading:
    try:
        answer = _answer(text, reasoning)
        objects = _own_objects(answer, response)
    except Unreadable:
        return UNPARSEABLE
    if not answer:
        return Reading(None, "empty")
    whole = [value for found in objects for part in _closed(found.value) for value in _statements(part, keys)]
    if truncated and not whole:
        return TRUNCATED
    readings = [value_of(value) for found in objects for value in _statements(found.value, keys)]
    prose = _without(answer, find_objects(answer))
    readings += [value_of(value) for value in _stated_lines(prose, keys, response)]
    if any(_name(key) in keys for key in _QUOTED_KEY.findall(prose)):  # pieces of an object that was not read
        return AMBIGUOUS
    if not readings and not objects:  # an answer of one word
        word = value_of(prose.replace("```", ""))
        if word.verdict is not None and not _copied(prose, response, whole=True):
            return word
    return _agree(readings)


def _agree(readings: Sequence[Reading]) -> Reading:
    """The one thing that all statements say."""
    if not readings:
        return UNPARSEABLE
    return readings[0] if len(set(readings)) == 1 else AMBIGUOUS


def _answer(text: str | None, reasoning: str | None) -> str:
    """The answer itself: behind reasoning blocks and channels, or what ends the reasoning if there is nothing else.

    Raises Unreadable.
    """
    text = (text or "").strip()
    if _is_json(text):  # whatever its explanation quotes
        return text
    channels = list(_FINAL_CHANNEL.finditer(text))
    if channels:
        text = text[channels[-1].end() :]
    elif "<|channel|>" in text:
        text = ""
    ends = list(_THINK_END.finditer(text))
    if ends:
        if not all(found.complete for found in find_objects(text[: ends[-1].start()])):
            raise Unreadable("the end of a reasoning block within an object")
        text = text[ends[-1].end() :]
    start = _THINK_START.search(text)
    if start:
        text = text[: start.start()]
    text = text.strip()
    return text or _closing_object(reasoning or "")


def _is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True


def _closing_object(reasoning: str) -> str:
    """A server may file the whole answer under reasoning. Only an object that closes the text can be that answer, and
    only if no other object is there: drafts are not answers."""
    stripped = reasoning.strip().rstrip("`").rstrip()
    try:
        objects = find_objects(stripped)
    except Unreadable:
        return ""
    if len(objects) == 1 and objects[0].end == len(stripped) and stripped.endswith(("}", "]")):
        return stripped[objects[0].start :]
    return ""


def _own_objects(answer: str, response: str) -> list[Found]:
    """The objects that the judge wrote itself, not those it copied out of the response."""
    return [f for f in find_objects(answer) if not _copied(answer[f.start : f.end], response)]


def _copied(text: str, response: str, whole: bool = False) -> bool:
    squeezed = re.sub(r"\s+", "", text)
    original = re.sub(r"\s+", "", response)
    return squeezed == original if whole else bool(squeezed) and squeezed in original


def _without(text: str, objects: Sequence[Found]) -> str:
    pieces, position = [], 0
    for found in objects:
        pieces.append(text[position : found.start])
        position = found.end
    return "\n".join([*pieces, text[position:]])


def _stated_lines(prose: str, keys: frozenset[str], response: str) -> Iterator[str]:
    """Values of lines such as "**Verdict:** not met" that name a verdict key and nothing more."""
    for match in _LINE.finditer(prose):
        if _name(match.group(1)) in keys and not _copied(match.group(), response):
            yield match.group(2)


def _closed(value: Any) -> Iterator[Pairs]:
    """The outermost objects that were not cut short."""
    if isinstance(value, Pairs):
        if value.closed:
            yield value
        else:
            for _, inner in value:
                yield from _closed(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _closed(inner)


def _statements(value: Any, keys: frozenset[str]) -> Iterator[Any]:
    """Every value that stands under one of the keys, at any depth."""
    if isinstance(value, Pairs):
        for key, inner in value:
            if _name(key) in keys and not isinstance(inner, list):
                yield inner
            else:
                yield from _statements(inner, keys)
    elif isinstance(value, list):
        for inner in value:
            yield from _statements(inner, keys)


def _entries(value: Any) -> Iterator[tuple[int | None, Any]]:
    """(id, what is said about it) of a batched answer: objects with an id, or one object keyed by ids."""
    if isinstance(value, Pairs):
        ids = [inner for key, inner in value if _name(key) in ID_KEYS]
        if ids:
            yield _number(ids[0]) if len(ids) == 1 else None, value
        elif value and all(_number(key) is not None for key, _ in value):
            yield from ((_number(key), inner) for key, inner in value)
        else:
            for _, inner in value:
                yield from _entries(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _entries(inner)


def _number(identifier: Any) -> int | None:
    """3, "3", "c3", "C3" and "criterion 3" are criterion 3."""
    if isinstance(identifier, bool):
        return None
    match = re.fullmatch(r"(?:c|criterion)?[\s_-]*(\d{1,6})", str(identifier).strip().lower())
    return int(match.group(1)) if match else None


def _name(key: str) -> str:
    return re.sub(r"[\s_-]+", "_", key.strip().lower())


def _verdict_value(value: Any) -> Reading:
    if value is None:
        return Reading(None, "judge_unknown")
    if isinstance(value, Pairs | list):
        return UNPARSEABLE
    word = re.sub(r"[\s_-]+", " ", str(value).strip(_MARKUP).lower())
    if word in _WORDS:
        return Reading(_WORDS[word])
    return Reading(None, "judge_unknown") if word in _SAYS_UNKNOWN else UNPARSEABLE


def _score_value(value: Any) -> Reading:
    if value is None:
        return Reading(None, "judge_unknown")
    if isinstance(value, bool | Pairs | list):
        return UNPARSEABLE
    word = str(value).strip(_MARKUP).lower()
    if word in _SAYS_UNKNOWN:
        return Reading(None, "judge_unknown")
    match = re.fullmatch(r"(\d{1,2}(?:\.\d{1,3})?)(?:\s*/\s*10|\s+out of 10)?", word)
    score = float(match.group(1)) if match else 0.0
    return Reading(band_verdict(score)) if LOWEST <= score <= HIGHEST else UNPARSEABLE
