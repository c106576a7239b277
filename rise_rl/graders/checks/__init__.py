"""Named rule checks: IFEval's and IFBench's families under their public names, and our own under `rise:`."""

from __future__ import annotations

# Importing a module registers its checks.
from . import (  # noqa: F401
    ifbench_counts,
    ifbench_custom,
    ifbench_format,
    ifbench_words,
    ifeval_structure,
    ifeval_words,
    own,
)
from .registry import CHECKS, JUDGED, Check, CheckError, check, find

__all__ = ["CHECKS", "JUDGED", "Check", "CheckError", "check", "find"]
