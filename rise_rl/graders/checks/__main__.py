"""`python -m rise_rl.graders.checks [docs/rubrics.md]`: prints the table of checks, or writes it into the page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from . import CHECKS, JUDGED, Check

BEGIN, END = (
    "<!-- checks: begin (written by python -m rise_rl.graders.checks docs/rubrics.md) -->",
    "<!-- checks: end -->",
)


def table() -> str:
    head = ["| check | parameters | asks to | in detail |", "|---|---|---|---|"]
    rows = [
        f"| `{name}` | {_parameters(check)} | {check.wish} | {_detail(check)} |"
        for name, check in sorted(CHECKS.items())
    ]
    judged = [
        f"| `{name}` | | {wish} | Needs a judge: IFBench rows send it there. |" for name, wish in sorted(JUDGED.items())
    ]
    return "\n".join([*head, *rows, *judged])


def insert(page: str) -> str:
    """The page with the table between its two marks renewed."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"expected the marks {BEGIN!r} and {END!r} in the page, found none or one")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def _detail(check: Check) -> str:
    return " ".join((check.function.__doc__ or "").split()).replace("|", "\\|")


def _parameters(check: Check) -> str:
    fields = check.parameters.model_fields
    return "; ".join(f"`{name}`: {_kind(field.annotation)}" for name, field in fields.items())


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f'"{value}"' for value in get_args(annotation))
    if get_origin(annotation) is list:
        return "list of texts"
    return {str: "text", int: "whole number", float: "number"}[annotation]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        path.write_text(insert(path.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())
