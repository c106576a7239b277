"""Verdicts on disk: known ones only, under everything that could have changed the answer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import diskcache

from ..rubric import as_verdict
from .errors import GraderError

FORMAT = 1
"""Part of every key; raised when stored verdicts must no longer be used."""


def cache_key(**parts: Any) -> str:
    """A hash over named parts, the same in every process. JSON keeps neighbouring texts apart."""
    text = json.dumps({"format": FORMAT, **parts}, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class VerdictCache:
    """SQLite in write-ahead mode (diskcache): processes and threads share a folder; a killed writer leaves it whole.

    Keep it on a local disk: SQLite's locks do not work on every network file system. Nothing is ever evicted.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._cache = diskcache.Cache(str(folder), eviction_policy="none", cull_limit=0, size_limit=1 << 50)
        except Exception as error:
            raise GraderError(f"judge.cache_dir: cannot open a cache in {folder}: {error}") from error

    def get(self, key: str) -> float | None:
        """The stored verdict, or None. What is no verdict counts as absent."""
        value = self._cache.get(key, retry=True)
        try:
            return as_verdict(value)
        except (ValueError, TypeError):
            return None

    def put(self, key: str, verdict: float) -> None:
        self._cache.set(key, float(verdict), retry=True)

    def __len__(self) -> int:
        return len(self._cache)

    def close(self) -> None:
        self._cache.close()
