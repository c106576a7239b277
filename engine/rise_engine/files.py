"""Folders that are either complete or absent, whatever happens while they are written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ASIDE = ".writing-"
REPLACED = ".replaced-"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields a folder beside `target` to write into; on success it is made durable and takes `target`'s place.

    On any error it is removed and `target` stays as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(ASIDE + target.name)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        for path in [*aside.rglob("*"), aside]:
            _fsync(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    old = target.with_name(REPLACED + target.name)
    if target.exists():
        os.rename(target, old)
    os.rename(aside, target)
    _fsync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(parent: Path) -> None:
    """Cleans up after a process that died inside `new_folder`: half-written folders go, a replaced one comes back."""
    if not parent.is_dir():
        return
    for path in parent.iterdir():
        if path.name.startswith(ASIDE):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(REPLACED):
            target = path.with_name(path.name.removeprefix(REPLACED))
            if target.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.rename(path, target)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
