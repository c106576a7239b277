"""One prompt with its rubric, and the error that says where a data file is wrong."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import RiseError
from ..graders.base import Message
from ..rubric import Criterion, Rubric


@dataclass(frozen=True)
class Example:
    """`uid` is unique within its file and the same at every load: groups of rollouts are keyed by it, never by text.

    messages: the conversation, with at least one user message (guidance goes to the last of them).
    domain: what the row says it is about, "" if nothing. meta: the row's other plain fields, and `format`.
    """

    uid: str
    messages: tuple[Message, ...]
    rubric: Rubric
    domain: str
    meta: Mapping[str, Any] = field(default_factory=dict)


class FieldError(ValueError):
    """A value in a row that is not what it should be; `field` is its path, such as `reward_model.rubrics[2].points`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field, self.message = field, message


class DataError(RiseError, ValueError):
    """What is wrong with the data, and where: str() puts file, row and field (as far as given) before the message.

    `row` counts from 1: the line in JSON lines, the record in other files (a CSV's header is none).
    """

    def __init__(self, message: str, *, file: str = "", row: int | None = None, field: str = "") -> None:
        place = ", ".join(part for part in (file, f"row {row}" if row is not None else "", field) if part)
        super().__init__(f"{place}: {message}" if place else message)
        self.message, self.file, self.row, self.field = message, file, row, field


def content_uid(messages: Iterable[Message], criteria: Iterable[Criterion]) -> str:
    """16 hex digits of a hash of the conversation and the criteria, for rows without an id of their own."""
    content = [[dict(m) for m in messages], [[c.text, c.weight] for c in criteria]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
