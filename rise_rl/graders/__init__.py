"""Graders: a response and its criteria in, one verdict per criterion out; what could not be judged is unknown."""

from __future__ import annotations

import importlib
from typing import Any

from .bands import band_verdict, bands
from .base import GradeItem, Grader, Message
from .routing import RoutingGrader, required_routes, route
from .rule import RuleGrader, validate

_LAZY = {  # a run without a judge loads no HTTP client
    "JudgeConfig": ".judge_config",
    "JudgeUnavailable": ".errors",
    "LlmGrader": ".llm",
    "load_grader": ".plugin",
    "parse_verdict": ".parse",
}

__all__ = [
    "GradeItem",
    "Grader",
    "JudgeConfig",
    "JudgeUnavailable",
    "LlmGrader",
    "Message",
    "RoutingGrader",
    "RuleGrader",
    "band_verdict",
    "bands",
    "load_grader",
    "parse_verdict",
    "required_routes",
    "route",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
