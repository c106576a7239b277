"""Rows of graded or nested rubrics: WritingBench's bands of 1-10, and weights per dimension."""

from __future__ import annotations

from ..rubric import Criterion
from .example import Example, FieldError
from .fields import as_list, as_messages, as_object, as_text, as_weight
from .formats import Row, make_criterion, make_example, register

BANDS = ("1-2", "3-4", "5-6", "7-8", "9-10")


@register("banded", 'query and checklist, whose items have "1-2" to "9-10"', lambda row: "checklist" in row)
def parse_banded(row: Row) -> Example:
    """WritingBench: five criteria scored 1-10, of equal weight; the bands go to the judge in tags.bands."""
    messages = as_messages(row.get("query"), "query")
    criteria = []
    for k, entry in enumerate(as_list(row.get("checklist"), "checklist")):
        field = f"checklist[{k}]"
        item = as_object(entry, field)
        text = as_text(item.get("criteria_description"), f"{field}.criteria_description")
        bands = {band: as_text(item.get(band), f"{field}.{band}") for band in BANDS}
        name = as_text(item.get("name"), f"{field}.name")
        criteria.append(make_criterion(text, 1.0, {"name": name, "bands": bands}, field))
    return make_example(row, "banded", messages, criteria, "checklist", row.get("domain1"), row.get("index"))


@register("dimensions", "prompt, dimension_weight and criterions", lambda row: "criterions" in row)
def parse_dimensions(row: Row) -> Example:
    """A criterion's weight is its own times its dimension's; its text is the criterion and its explanation."""
    messages = as_messages(row.get("prompt"), "prompt")
    weights = as_object(row.get("dimension_weight"), "dimension_weight")
    criteria: list[Criterion] = []
    for name, entries in as_object(row.get("criterions"), "criterions").items():
        if name not in weights:
            raise FieldError(
                f"dimension_weight.{name}", "expected a weight for this dimension of criterions, found none"
            )
        outer = as_weight(weights[name], f"dimension_weight.{name}")
        for k, entry in enumerate(as_list(entries, f"criterions.{name}")):
            field = f"criterions.{name}[{k}]"
            item = as_object(entry, field)
            text = as_text(item.get("criterion"), f"{field}.criterion")
            if isinstance(item.get("explanation"), str) and item["explanation"].strip():
                text = f"{text}: {item['explanation']}"
            weight = outer * as_weight(item.get("weight"), f"{field}.weight")
            criteria.append(make_criterion(text, weight, {"dimension": name}, field))
    return make_example(row, "dimensions", messages, criteria, "criterions", row.get("topic"))
