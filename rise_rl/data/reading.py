"""Rows out of .jsonl, .json, .parquet and .csv files, or a data set of the hub, one after the other."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .example import DataError, FieldError

Numbered = tuple[int, "Any | FieldError"]
"""The row's number, and the row, or what is wrong with it as a whole."""

_HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?::(?P<split>[\w.-]+))?")


def read_rows(source: str) -> Iterator[Numbered]:
    """source: a file, or `owner/name[:split]` on the hub (split "train"). Raises DataError if it cannot be read."""
    path = Path(source)
    if path.is_file() or path.suffix in _READERS:
        if path.suffix not in _READERS:
            raise DataError(f"expected a file ending in {', '.join(_READERS)}, found {path.name}", file=source)
        if not path.is_file():
            raise DataError("no such file", file=source)
        yield from _READERS[path.suffix](path)
    elif hub := _HUB_ID.fullmatch(source):
        yield from _hub(source, hub["name"], hub["split"] or "train")
    else:
        raise DataError("no such file, and no hub id of the form owner/name or owner/name:split", file=source)


def data_hash(source: str) -> str:
    """SHA-256 (hex): of a file's bytes, or of a hub data set's rows as JSON lines."""
    digest = hashlib.sha256()
    if Path(source).is_file():
        with open(source, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    else:
        for _, row in read_rows(source):
            digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def _json_lines(path: Path) -> Iterator[Numbered]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _not_utf8(line) or _loads(line.strip())


def _json(path: Path) -> Iterator[Numbered]:
    """One array of rows; many files of this name hold JSON lines, which is told by the first character."""
    text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    if not text.lstrip().startswith("["):
        yield from _json_lines(path)
        return
    rows = _not_utf8(text) or _loads(text)
    if isinstance(rows, FieldError):
        raise DataError(rows.message, file=str(path))
    yield from enumerate(rows, start=1)


def _loads(text: str) -> Any | FieldError:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        return FieldError("", f"expected JSON, found an error at {line}column {error.colno}: {error.msg}")


def _not_utf8(text: str) -> FieldError | None:
    """What is wrong with text that was read with errors="surrogateescape", so that one bad byte costs one row."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) - 0xDC00
        return FieldError("", f"expected UTF-8 text, found byte 0x{byte:02x} after {text[: error.start][-20:]!r}")
    return None


def _parquet(path: Path) -> Iterator[Numbered]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"expected a parquet file: {error}", file=str(path)) from None
    number = 0
    for batch in file.iter_batches(batch_size=256):
        for row in batch.to_pylist():
            yield (number := number + 1), row


def _csv(path: Path) -> Iterator[Numbered]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=1):
            if error := _not_utf8("".join(str(value) for value in row.values())):
                yield number, error
            elif None in row:
                yield number, FieldError("", f"expected {len(row) - 1} cells, found {len(row[None]) + len(row) - 1}")
            else:
                yield number, {key: value or None for key, value in row.items()}


def _hub(source: str, name: str, split: str) -> Iterator[Numbered]:
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # the library raises many kinds: not found, no network, no such split
        raise DataError(f"no such file, and the hub gave {type(error).__name__}: {error}", file=source) from error
    yield from enumerate(rows, start=1)


_READERS: dict[str, Callable[[Path], Iterator[Numbered]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
}
