"""Values as publishers write them, made into one form, or a FieldError that says what was found and expected."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..graders.base import Message
from .example import FieldError

HALF = re.compile("[\ud800-\udfff]")
ROLES = ("system", "user", "assistant")

IMPORTANCE = {"critical": 1.0, "essential": 1.0, "important": 0.7, "nice_to_have": 0.3, "optional": 0.3}
"""Words for weights: essential 1, important 0.7, optional 0.3, as in Rubrics as Rewards (Gunjal et al. 2025)."""


def is_missing(value: object) -> bool:
    """None and NaN: how parquet and JSON writers pad what is not there."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def decode(value: Any) -> Any:
    """JSON inside JSON: text that holds an object or an array becomes it; everything else stays."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


def refuse_half_characters(value: Any, field: str = "") -> None:
    """FieldError for text, however deep inside the value, that has no UTF-8: half of a surrogate pair, as JSON writers
    leave behind that cut text in the middle of an emoji. No tokenizer takes it, and no file.
    """
    decoded = decode(value)
    if isinstance(decoded, Mapping):
        for key, entry in decoded.items():
            refuse_half_characters(entry, f"{field}.{key}" if field else str(key))
    elif isinstance(decoded, list):
        for i, entry in enumerate(decoded):
            refuse_half_characters(entry, f"{field}[{i}]")
    elif isinstance(decoded, str) and (half := HALF.search(decoded)):
        around = decoded[max(half.start() - 20, 0) : half.start() + 20]
        raise FieldError(field, f"expected text with whole characters, found half of a surrogate pair in {around!r}")


def as_object(value: Any, field: str) -> Mapping[str, Any]:
    decoded = decode(value)
    if not isinstance(decoded, Mapping):
        raise FieldError(field, f"expected an object, found {show(value)}")
    return decoded


def as_list(value: Any, field: str) -> list[Any]:
    decoded = decode(value)
    if not isinstance(decoded, list) or not decoded:
        raise FieldError(field, f"expected a non-empty list, found {show(value)}")
    return decoded


def as_text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise FieldError(field, f"expected a non-empty text, found {show(value)}")
    return value


def as_weight(value: Any, field: str) -> float:
    """A finite number: int, float, or text that spells one."""
    number = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with suppress(ValueError):
            number = float(value)
    if not math.isfinite(number):
        raise FieldError(field, f"expected a finite number, found {show(value)}")
    return number


def as_importance(value: Any, field: str) -> float:
    word = value.strip().lower().replace(" ", "_").replace("-", "_") if isinstance(value, str) else None
    if word not in IMPORTANCE:
        raise FieldError(field, f"expected one of {', '.join(IMPORTANCE)}, found {show(value)}")
    return IMPORTANCE[word]


def as_tags(value: Any, field: str) -> dict[str, Any]:
    """An object; a list of "key:value"; text of either, or of "key:value, key:value". A key given twice: a list."""
    decoded = decode(value)
    if is_missing(decoded):
        return {}
    if isinstance(decoded, Mapping):
        return {str(key): entry for key, entry in decoded.items() if not is_missing(entry)}
    entries = decoded.split(",") if isinstance(decoded, str) else decoded
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise FieldError(field, f'expected an object, a list of "key:value" or text, found {show(value)}')
    tags: dict[str, Any] = {}
    for entry in entries:
        key, colon, text = (part.strip() for part in entry.partition(":"))
        if key or colon:
            content = text if colon else True
            tags[key] = content if key not in tags else [*_listed(tags[key]), content]
    return tags


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def as_messages(value: Any, field: str) -> tuple[Message, ...]:
    """A list of {"role", "content"}, JSON text of one, or plain text (one user message). A user message is required."""
    decoded = decode(value)
    if isinstance(value, str) and not _is_chat(decoded):
        return ({"role": "user", "content": as_text(value, field)},)
    if not isinstance(decoded, list) or not decoded:
        raise FieldError(field, f"expected text or a non-empty list of messages, found {show(value)}")
    messages = []
    for i, message in enumerate(decoded):
        at = f"{field}[{i}]"
        entry = as_object(message, at)
        role, content = entry.get("role"), entry.get("content")
        if role not in ROLES:
            raise FieldError(f"{at}.role", f"expected one of {', '.join(ROLES)}, found {show(role)}")
        if not isinstance(content, str) or (role == "user" and not content.strip()):
            raise FieldError(f"{at}.content", f"expected text, found {show(content)}")
        messages.append({"role": role, "content": content})
    if not any(message["role"] == "user" for message in messages):
        roles = ", ".join(message["role"] for message in messages)
        raise FieldError(field, f"expected at least one message from the user, found only {roles}")
    return tuple(messages)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)
