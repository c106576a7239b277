"""From a source to examples: read, parse, and give every row a uid of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from os import PathLike, fspath

from . import graded, ifeval, rubrichub  # noqa: F401  (importing a format registers it)
from .example import DataError, Example, FieldError
from .fields import refuse_half_characters, show
from .formats import parse_row
from .reading import read_rows


def iter_examples(source: str | PathLike[str]) -> Iterator[Example | DataError]:
    """Every row in order, bad ones as the error that describes them. Raises DataError if the source cannot be read.

    uid: the row's own id (`uid`, `id`, `prompt_id`, `key`; also in `extra_info`), else a hash of its content. A row
    that repeats an earlier uid gets "#2", "#3", ... and meta["copy_of"]: a prompt of its own, with a group of its own.
    """
    source = fspath(source)
    seen: set[str] = set()
    for number, row in read_rows(source):
        try:
            if isinstance(row, FieldError):
                raise row
            if not isinstance(row, Mapping):
                raise FieldError("", f"expected an object, found {show(row)}")
            refuse_half_characters(row)
            example = parse_row(row)
        except FieldError as error:
            yield DataError(error.message, file=source, row=number, field=error.field)
            continue
        uid, copies = example.uid, 1
        while uid in seen:
            copies += 1
            uid = f"{example.uid}#{copies}"
        seen.add(uid)
        yield example if copies == 1 else replace(example, uid=uid, meta={**example.meta, "copy_of": example.uid})


def load_examples(source: str | PathLike[str]) -> list[Example]:
    """All examples of a file (.jsonl, .json, .parquet, .csv) or hub data set (`owner/name`, `owner/name:split`).

    Raises DataError at the first bad row, naming file, row and field, and for a source without any row.
    """
    examples = []
    for entry in iter_examples(source):
        if isinstance(entry, DataError):
            raise entry
        examples.append(entry)
    if not examples:
        raise DataError("expected at least one row, found none", file=fspath(source))
    return examples
