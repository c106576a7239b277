"""Writes docs/config.md, the page of all configuration keys: `python -m rise_rl.config_docs`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter
from pydantic_core import PydanticUndefined

from .config import Config
from .config_errors import section_of
from .sft_config import SftConfig

PAGE = Path(__file__).parents[1] / "docs" / "config.md"
HEAD = """# Configuration

One YAML file a run; any key can be overridden on the command line as `section.key=value`, and unknown keys are refused
with the nearest valid name. `base: other.yaml` at the top of a file, relative to it, names a file whose values hold
where this one has none. This page is generated from the code by `python -m rise_rl.config_docs`.
"""

SFT = """## rise-rl sft

The supervised baseline (docs/baselines.md) has a file of its own kind: name, model, seed, output, trackers, data,
engine and checkpoint as above, and these.
"""


def type_name(annotation: Any) -> str:
    """The type as a person would write it: choices by name, "or null" for optional, "list of" for tuples."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, UnionType):
        return " or ".join(type_name(a) for a in arguments)
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    return annotation.__name__


def default_text(field: Any) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined or isinstance(default, BaseModel):
        return ""
    if isinstance(default, tuple) and default and len(str(default)) > 60:
        return f"{len(default)} built-in"
    return f"`{as_yaml(field.annotation, default)}`"


def as_yaml(annotation: Any, value: Any) -> str:
    """A value of a key of this type as it stands in a configuration file, on one line."""
    plain = TypeAdapter(annotation).dump_python(value, mode="json")
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def rows(model: type[BaseModel], prefix: str = "") -> list[str]:
    lines = []
    for name, field in model.model_fields.items():
        key, inner = f"{prefix}{name}", section_of(field.annotation)
        kind = "section" if inner else type_name(field.annotation)
        text = (field.description or (inner.__doc__ if inner else "") or "").strip().split("\n\n")[0].replace("\n", " ")
        lines.append(f"| `{key}` | {kind} | {default_text(field)} | {text.replace('|', 'or')} |")
        if inner:
            lines += rows(inner, f"{key}.")
    return lines


def table(lines: Iterable[str]) -> str:
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *lines]) + "\n"


def page() -> str:
    common = rows(Config)
    own = [line for line in rows(SftConfig) if line not in common]
    return f"{HEAD}\n{table(common)}\n{SFT}\n{table(own)}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
