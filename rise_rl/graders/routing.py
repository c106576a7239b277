"""Each criterion goes to the grader its `verifier` tag names; verdicts come back in the rubric's order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from ..rubric import Criterion, Rubric, Verdict
from .base import GradeItem, Grader
from .judge_stats import JudgeStats

ROUTES = ("rule", "llm")


class HasRubric(Protocol):
    @property
    def uid(self) -> str: ...

    @property
    def rubric(self) -> Rubric: ...


def route(criterion: Criterion) -> str:
    """ "rule" or "llm" (also where the tag is missing). Raises ValueError for another verifier."""
    verifier = criterion.tags.get("verifier") or "llm"
    if verifier not in ROUTES:
        raise ValueError(f"verifier: expected one of {', '.join(ROUTES)}, found {verifier!r} for {criterion.text!r}")
    return verifier


def required_routes(examples: Iterable[HasRubric]) -> set[str]:
    """The graders these examples need, for a check before a run starts."""
    return {route(criterion) for example in examples for criterion in example.rubric.criteria}


class RoutingGrader:
    """`llm=None` where no criterion needs a judge; `require` says so before a run starts, `grade` at the latest."""

    def __init__(self, rule: Grader, llm: Grader | None = None) -> None:
        self.graders: dict[str, Grader] = {"rule": rule} | ({"llm": llm} if llm is not None else {})

    @property
    def judge_stats(self) -> JudgeStats | None:
        """The judge's counters, if there is a judge that keeps any."""
        return getattr(self.graders.get("llm"), "stats", None)

    def require(self, examples: Iterable[HasRubric]) -> None:
        """Raises ValueError if a criterion needs a grader that is not there."""
        for example in examples:
            self._require(example.rubric.criteria, example.uid)

    def grade(self, items: Sequence[GradeItem]) -> list[list[Verdict]]:
        places: dict[str, list[list[int]]] = {}  # route -> per item, the criteria that go there
        for i, item in enumerate(items):
            self._require(item.criteria, item.uid)
            for k, criterion in enumerate(item.criteria):
                places.setdefault(route(criterion), [[] for _ in items])[i].append(k)
        verdicts: list[list[Verdict]] = [[None] * len(item.criteria) for item in items]
        for name, chosen in places.items():
            asked = [(item, mine) for item, mine in enumerate(chosen) if mine]
            parts = [replace(items[i], criteria=[items[i].criteria[k] for k in mine]) for i, mine in asked]
            for (i, mine), answers in zip(asked, self.graders[name].grade(parts), strict=True):
                for k, verdict in zip(mine, answers, strict=True):
                    verdicts[i][k] = verdict
        return verdicts

    def _require(self, criteria: Sequence[Criterion], uid: str) -> None:
        for criterion in criteria:
            if (needed := route(criterion)) not in self.graders:
                raise ValueError(
                    f"prompt {uid!r}: the criterion {criterion.text!r} needs the {needed} grader, found only "
                    f"{', '.join(self.graders)}; configure a judge, or use data whose criteria all have tags.verifier "
                    '"rule"'
                )
