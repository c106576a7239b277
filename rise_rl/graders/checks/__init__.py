"""Named rule checks: IFEval's and IFBench's families under their public names, and our own under `rise:`."""

from __future__ import annotations

from . import ifeval_structure, ifeval_words, own  # noqa: F401  (importing a module registers its checks)
from .registry import CHECKS, Check, CheckError, check, find

__all__ = ["CHECKS", "Check", "CheckError", "check", "find"]
