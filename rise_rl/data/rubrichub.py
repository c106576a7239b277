"""Rows that hold a list of criteria: RubricHub, HealthBench (both tag shapes and OpenAI's own), importance words.

The list is `rubrics`, `reward_model.rubrics` or `reward_model.ground_truth.rubrics`; an item has a text (`criterion` or
`description`) and a weight (`points`, `weight` or a word in `importance`; none at all in the whole list: 1 each).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..rubric import Criterion
from .example import Example, FieldError
from .fields import (
    as_importance,
    as_list,
    as_messages,
    as_object,
    as_tags,
    as_text,
    as_weight,
    decode,
    is_missing,
    show,
)
from .formats import Row, make_criterion, make_example, register

_PLACES = (("rubrics",), ("reward_model", "rubrics"), ("reward_model", "ground_truth", "rubrics"))
_TEXT_KEYS = ("criterion", "description")
_WEIGHT_KEYS = {"points": as_weight, "weight": as_weight, "importance": as_importance}
_PROMPT_KEYS = ("prompt", "query", "question")


def _find(row: Row) -> tuple[str, Any] | None:
    for place in _PLACES:
        value: Any = row
        for key in place:
            value = decode(value.get(key)) if isinstance(value, Mapping) else None
        if not is_missing(value):
            return ".".join(place), value
    return None


@register("rubrics", "prompt, and rubrics in reward_model.rubrics or rubrics", lambda row: _find(row) is not None)
def parse(row: Row) -> Example:
    found = _find(row)
    assert found is not None
    place, rubrics = found
    prompt = next((key for key in _PROMPT_KEYS if not is_missing(row.get(key))), "prompt")
    messages = as_messages(row.get(prompt), prompt)
    items = [as_object(item, f"{place}[{k}]") for k, item in enumerate(as_list(rubrics, place))]
    unweighted = not any(key in item and item[key] is not None for item in items for key in _WEIGHT_KEYS)
    criteria = [_criterion(item, f"{place}[{k}]", unweighted) for k, item in enumerate(items)]
    domain = row.get("ability") or row.get("domain") or row.get("data_source")
    return make_example(row, "rubrics", messages, criteria, place, domain)


def _criterion(item: Mapping[str, Any], field: str, unweighted: bool) -> Criterion:
    key = next((key for key in _TEXT_KEYS if not is_missing(item.get(key))), _TEXT_KEYS[0])
    text = as_text(item.get(key), f"{field}.{key}")
    tags = as_tags(item.get("tags"), f"{field}.tags")
    tags |= {k: item[k] for k in ("title", "dimension") if isinstance(item.get(k), str)}
    if "parameters" in tags:
        given = as_object(tags["parameters"], f"{field}.tags.parameters")
        tags["parameters"] = {k: v for k, v in given.items() if not is_missing(v)}
    return make_criterion(text, 1.0 if unweighted else _weight(item, field), tags, field)


def _weight(item: Mapping[str, Any], field: str) -> float:
    for key, convert in _WEIGHT_KEYS.items():
        if item.get(key) is not None:
            return convert(item[key], f"{field}.{key}")
    found = show(list(item))
    raise FieldError(
        f"{field}.points", f"expected a weight, as other items of the row have one, found the keys {found}"
    )
