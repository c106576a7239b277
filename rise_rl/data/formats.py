"""The registry of row formats: `detect` looks at a row's keys, `parse` makes an Example of it or raises FieldError."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..graders.base import Message
from ..graders.checks import CheckError
from ..graders.routing import route
from ..graders.rule import validate
from ..rubric import Criterion, Rubric
from .example import Example, FieldError, content_uid
from .fields import decode, is_missing

Row = Mapping[str, Any]
_ID_KEYS = ("uid", "id", "prompt_id", "key")
_EXTRA_ID_KEYS = ("uid", "id", "healthbench_prompt_id")


@dataclass(frozen=True)
class Format:
    name: str
    expects: str
    detect: Callable[[Row], bool]
    parse: Callable[[Row], Example]


FORMATS: list[Format] = []


def register(name: str, expects: str, detect: Callable[[Row], bool]) -> Callable[[Callable[[Row], Example]], Any]:
    def add(parse: Callable[[Row], Example]) -> Callable[[Row], Example]:
        FORMATS.append(Format(name, expects, detect, parse))
        return parse

    return add


def parse_row(row: Row) -> Example:
    """The first format that detects the row parses it. Raises FieldError."""
    for fmt in FORMATS:
        if fmt.detect(row):
            return fmt.parse(row)
    known = "; ".join(f"{fmt.name}: {fmt.expects}" for fmt in FORMATS)
    raise FieldError("", f"expected a row of a known format ({known}), found the keys {', '.join(map(str, row))}")


def make_criterion(
    text: str, weight: float, tags: Mapping[str, Any], field: str, fields: Callable[[str], str] | None = None
) -> Criterion:
    """Routed and, for a rule, validated. fields: from a path inside the tags to the row's; by default below `field`."""
    path = fields or (lambda inner: f"{field}.tags.{inner}")
    try:
        criterion = Criterion(text, weight, {**tags, "verifier": tags.get("verifier") or "llm"})
    except ValueError as error:
        raise FieldError(field, str(error)) from None
    try:
        if route(criterion) == "rule":
            validate(criterion)
    except CheckError as error:
        raise FieldError(path(error.field), error.message) from None
    except ValueError as error:
        raise FieldError(path("verifier"), str(error).removeprefix("verifier: ")) from None
    return criterion


def make_example(
    row: Row,
    fmt: str,
    messages: tuple[Message, ...],
    criteria: Sequence[Criterion],
    rubric_field: str,
    domain: object = None,
    uid: object = None,
) -> Example:
    try:
        rubric = Rubric(tuple(criteria))
    except ValueError as error:
        raise FieldError(rubric_field, str(error).removeprefix("rubric: ")) from None
    extra = decode(row.get("extra_info"))
    extra = extra if isinstance(extra, Mapping) else {}
    ids = [uid, *(row.get(key) for key in _ID_KEYS), *(extra.get(key) for key in _EXTRA_ID_KEYS)]
    own = next((str(value) for value in ids if isinstance(value, (str, int)) and str(value).strip()), None)
    meta = {key: value for source in (extra, row) for key, value in source.items() if _plain(key, value)}
    return Example(
        uid=own or content_uid(messages, criteria),
        messages=messages,
        rubric=rubric,
        domain=domain if isinstance(domain, str) else "",
        meta={**meta, "format": fmt},
    )


def _plain(key: str, value: object) -> bool:
    if key in ("prompt", "query", "question") or is_missing(value):
        return False
    return isinstance(decode(value), (str, int, float))
