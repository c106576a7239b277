"""Mistakes in a configuration, said in the keys of its file instead of pydantic's terms."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def explain(model: type[BaseModel], error: ValidationError) -> Iterator[str]:
    """A line for each key that is wrong, `model` being what the whole file was read as."""
    by_key: dict[str, list[Any]] = {}
    for mistake in error.errors():
        keys, _ = _place(model, mistake)
        by_key.setdefault(".".join(keys) or "configuration", []).append(mistake)
    for key, mistakes in by_key.items():
        yield f"  {key}: {_unknown(model, mistakes[0]) or _unfit(mistakes)}"


def _place(model: type[BaseModel], mistake: Any) -> tuple[list[str], type[BaseModel] | None]:
    """The keys that lead to a mistake and the section around the last one. Between them pydantic names the branches of
    a union, which are nobody's keys.
    """
    keys: list[str] = []
    section: type[BaseModel] | None = model
    around = section
    for part in mistake["loc"]:
        known = section is not None and part in section.model_fields
        if known or isinstance(part, int) or mistake["type"] == "extra_forbidden":
            keys.append(str(part))
            around = section
        if section is not None and known:
            section = section_of(section.model_fields[str(part)].annotation)
    return keys, around


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that stands under a key of this type, maybe beside null."""
    options = [annotation, *get_args(annotation)]
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def _unknown(model: type[BaseModel], mistake: Any) -> str | None:
    if mistake["type"] != "extra_forbidden":
        return None
    keys, section = _place(model, mistake)
    siblings = list(section.model_fields) if section else []
    close = difflib.get_close_matches(keys[-1], siblings, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"valid keys here: {', '.join(sorted(siblings))}"
    return f"unknown key; {hint}"


def _unfit(mistakes: Sequence[Any]) -> str:
    """What was expected, by each branch of a union, and what was found, unless that is a whole section."""
    said = [_message(m) for m in mistakes]
    expected = ", or ".join([said[0], *(text.removeprefix("Input should be ") for text in said[1:])])
    value = mistakes[0]["input"]
    found = f" (found {value!r})"
    whole = mistakes[0]["type"] == "missing" or isinstance(value, Mapping | BaseModel) or len(found) >= 200
    return expected if whole else expected + found


def _message(mistake: Any) -> str:
    if mistake["type"] in ("model_type", "model_attributes_type"):
        return "Input should be keys and values"
    return mistake["msg"].removeprefix("Value error, ")
