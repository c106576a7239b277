"""The table of named rule checks: each is a small function of the response, its keywords are its parameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

CheckFunction = Callable[..., "bool | float"]


class CheckError(ValueError):
    """A criterion names no known check, or its parameters do not fit. `field` is a path inside the criterion's tags."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


@dataclass(frozen=True)
class Check:
    """wish: what the check asks of a response, as a short imperative with the parameters in braces."""

    name: str
    function: CheckFunction
    wish: str
    parameters: type[BaseModel]

    def bind(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Typed parameters; nulls and NaN are padding and dropped. CheckError: an unknown, missing or unfit one."""
        given = {name: value for name, value in raw.items() if not is_padding(value)}
        try:
            model = self.parameters.model_validate(given)
        except ValidationError as error:
            # A misspelt name is what is wrong, not that the right one is missing.
            first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
            path = ".".join(["parameters", *(str(part) for part in first["loc"])])
            known = ", ".join(self.parameters.model_fields) or "none"
            found = "nothing" if first["type"] == "missing" else repr(first["input"])
            wrong = "Unknown parameter" if first["type"] == "extra_forbidden" else first["msg"]
            raise CheckError(path, f"{wrong}; found {found} ({self.name} takes {known})") from None
        return {name: getattr(model, name) for name in type(model).model_fields}

    def describe(self, raw: Mapping[str, Any]) -> str:
        return self.wish.format_map({name: _spell(value) for name, value in self.bind(raw).items()})


CHECKS: dict[str, Check] = {}

JUDGED: dict[str, str] = {}
"""Public names of instructions that need a judge: name -> what they ask of a response."""


def check(name: str, wish: str) -> Callable[[CheckFunction], CheckFunction]:
    """Registers `function(response, *, parameter: type, ...) -> bool | float in [0, 1]` under its public name."""

    def register(function: CheckFunction) -> CheckFunction:
        if name in CHECKS:
            raise ValueError(f"check {name}: registered twice")
        hints = get_type_hints(function, include_extras=True)
        fields: dict[str, Any] = {
            p.name: (hints[p.name], ... if p.default is p.empty else p.default)
            for p in inspect.signature(function).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        }
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        CHECKS[name] = Check(name, function, wish, model)
        return function

    return register


def judged(name: str, wish: str) -> None:
    JUDGED[name] = wish


def find(name: object) -> Check:
    if not isinstance(name, str):
        raise CheckError("function", f"expected the name of a check, found {name!r}")
    if name not in CHECKS:
        raise CheckError("function", f"unknown check {name!r}; {_suggest(name, CHECKS)}")
    return CHECKS[name]


def is_padding(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _suggest(name: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), n=3)
    return f"expected one such as {', '.join(close)}" if close else "docs/rubrics.md lists the known ones"


def _spell(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
