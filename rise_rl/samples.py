"""A graded answer, and the passage from prompts to graded answers: request, rollout, verdicts, reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rise_engine.agreement import everywhere
from rise_engine.rollout.base import Rollout

from .data import Example
from .graders.base import GradeItem, Grader
from .graders.errors import JudgeUnavailable
from .rubric import Verdict

Kind = Literal["natural", "guided"]


@dataclass(frozen=True)
class Sample:
    """One rollout with its verdicts. reward: complete-rubric reward in [0, 1], None if a verdict is unknown.

    kind: natural answers make up the group. shown: indices of the criteria its prompt named; empty for a natural one,
    unless rollouts are scaffolded (RuscaRL).
    """

    example: Example
    rollout: Rollout
    verdicts: list[Verdict]
    reward: float | None
    shown: tuple[int, ...] = ()
    kind: Kind = "natural"

    @property
    def length(self) -> int:
        return len(self.rollout.token_ids)

    @property
    def truncated(self) -> bool:
        return self.rollout.finish_reason == "length"

    def record(self) -> dict[str, Any]:
        """What a run keeps of it."""
        return {
            "uid": self.example.uid,
            "index": self.rollout.index,
            "kind": self.kind,
            "prompt": self.example.messages[-1]["content"],
            "response": self.rollout.text,
            "finish_reason": self.rollout.finish_reason,
            "tokens": self.length,
            "weight_version": self.rollout.weight_version,
            "reward": self.reward,
            "verdicts": self.verdicts,
            "criteria": [{"text": c.text, "weight": c.weight} for c in self.example.rubric.criteria],
            "shown": list(self.shown),
        }


def require_graded(samples: Sequence[Sample], of: str) -> None:
    """JudgeUnavailable, on all ranks alike, if not one answer was graded: there is nothing to learn or to say."""
    if samples and all(s.reward is None for s in samples):
        raise everywhere(
            JudgeUnavailable(
                f"{of}: all {len(samples)} answers are ungraded, because each has a criterion whose verdict is "
                "unknown. No verdict was made up; check that the judge answers at judge.base_urls (`rise-rl "
                "judge-check` says how well), or the grader of your own, and go on with --resume"
            )
        )


def grade_rollouts(
    grader: Grader,
    examples: Sequence[Example],
    rollouts: Sequence[Rollout],
    shown: Sequence[tuple[int, ...]] | None = None,
    kind: Kind = "natural",
) -> list[Sample]:
    """Judges each rollout on the complete rubric of its example (same order) under the original conversation."""
    items = [
        GradeItem(uid=e.uid, messages=e.messages, response=r.text, criteria=e.rubric.criteria)
        for e, r in zip(examples, rollouts, strict=True)
    ]
    verdicts = grader.grade(items)
    if [len(row) for row in verdicts] != [len(item.criteria) for item in items]:
        raise ValueError(f"{type(grader).__name__}.grade: expected one verdict per criterion of every item")
    return [
        Sample(e, r, list(v), e.rubric.reward(v), s, kind)
        for e, r, v, s in zip(examples, rollouts, verdicts, shown or [()] * len(rollouts), strict=True)
    ]
