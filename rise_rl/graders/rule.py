"""Criteria that a program can check: `tags` name the check and its parameters, the verdict is exact."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from ..rubric import Criterion, Verdict, as_verdict
from .base import GradeItem
from .checks import CheckError, find
from .reasoning import without_reasoning

VERSION = 2
"""Counts up when a check comes to judge differently, so that a graded file's old verdicts are not taken over."""

logger = logging.getLogger(__name__)


def bind(criterion: Criterion) -> Callable[[str], bool | float]:
    """The criterion's check with its parameters filled in. CheckError: unknown name, missing or unfit parameter."""
    check = find(criterion.tags.get("function"))
    parameters = criterion.tags.get("parameters")
    if parameters is not None and not hasattr(parameters, "items"):
        raise CheckError("parameters", f"expected an object, found {parameters!r}")
    return partial(check.function, **check.bind(parameters or {}))


def validate(criterion: Criterion) -> None:
    """Raises CheckError as `bind` does; `load_examples` asks it of every rule criterion, before a run starts."""
    bind(criterion)


class RuleGrader:
    """Checks answers without the model's reasoning. An empty one meets no check, as in IFEval's own evaluation. A check
    that raises is an unknown verdict.

    identity: what tells its verdicts from an earlier version's (`grade_file`).
    failures: how often each check raised; the first time of each is logged with its traceback.
    """

    identity = f"rule checks {VERSION}"

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()

    def grade(self, items: Sequence[GradeItem]) -> list[list[Verdict]]:
        """Raises CheckError for a criterion that `validate` would refuse."""
        answers = [without_reasoning(item.response) for item in items]
        return [[self._verdict(answer, criterion) for criterion in i.criteria] for i, answer in zip(items, answers)]

    def _verdict(self, answer: str, criterion: Criterion) -> Verdict:
        check = bind(criterion)
        if not answer.strip():
            return 0.0
        name = criterion.tags["function"]
        try:
            return as_verdict(check(answer))
        except Exception:  # a verdict is never made up: whatever went wrong, the sample is ungraded
            if not self.failures[name]:
                logger.warning("check %s raised on %r; the verdict is unknown", name, answer[:200], exc_info=True)
            self.failures[name] += 1
            return None
