"""Files that are whole or what they were before, and files of JSON lines whose last one a kill may have cut."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import RiseError


class FileError(RiseError):
    """A file cannot be written or read; the message names it."""


def write_aside(path: Path, text: str) -> None:
    """The whole file, on the disk when this returns, or what was there before and FileError. Half a surrogate pair,
    which has no UTF-8, is written as its backslash form, as JSON does.
    """
    aside = path.with_name(path.name + ".tmp")
    try:
        with aside.open("w", encoding="utf-8", errors="backslashreplace", newline="") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(aside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as e:
        aside.unlink(missing_ok=True)
        raise FileError(f"{path}: cannot be written ({e.strerror})") from e


def read_lines(path: Path) -> list[Any]:
    """The values of a JSON-lines file, [] if there is none. A last line cut by a kill is left out; one cut elsewhere
    raises FileError.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as e:
            if number < len(lines):
                raise FileError(f"{path}, line {number}: not JSON ({e})") from e
    return rows
