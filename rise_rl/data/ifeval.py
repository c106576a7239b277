"""IFEval and IFBench rows: `prompt`, `instruction_id_list`, `kwargs`; every instruction is a criterion of weight 1.

The few IFBench instructions that no program can check (checks.JUDGED) become criteria for the judge.
"""

from __future__ import annotations

from typing import Any

from ..graders.checks import JUDGED, CheckError, find
from ..rubric import Criterion
from .example import Example, FieldError
from .fields import as_list, as_messages, as_object, is_missing
from .formats import Row, make_criterion, make_example, register


@register("ifeval", "prompt, instruction_id_list and kwargs", lambda row: "instruction_id_list" in row)
def parse(row: Row) -> Example:
    messages = as_messages(row.get("prompt"), "prompt")
    names = as_list(row.get("instruction_id_list"), "instruction_id_list")
    kwargs = as_list(row.get("kwargs"), "kwargs")
    if len(kwargs) != len(names):
        raise FieldError("kwargs", f"expected one entry for each of {len(names)} instructions, found {len(kwargs)}")
    criteria = [_criterion(k, name, given) for k, (name, given) in enumerate(zip(names, kwargs))]
    return make_example(row, "ifeval", messages, criteria, "instruction_id_list", "instruction_following")


def _criterion(k: int, name: Any, given: Any) -> Criterion:
    def place(inner: str) -> str:
        return f"instruction_id_list[{k}]" if inner == "function" else inner.replace("parameters", f"kwargs[{k}]", 1)

    raw = {} if is_missing(given) else as_object(given, f"kwargs[{k}]")
    parameters = {key: value for key, value in raw.items() if not is_missing(value)}
    if name in JUDGED:
        return make_criterion(JUDGED[name], 1.0, {"verifier": "llm", "instruction": name}, place("function"))
    try:
        text = find(name).describe(parameters)
    except CheckError as error:
        raise FieldError(place(error.field), error.message) from None
    tags = {"verifier": "rule", "function": name, "parameters": parameters}
    return make_criterion(text, 1.0, tags, place("function"), place)
