"""What every grader is: a response and its criteria in, one verdict per criterion out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..rubric import Criterion, Verdict

Message = Mapping[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}"""


@dataclass(frozen=True)
class GradeItem:
    """One response to be judged. `messages` is the original conversation, never the guided one."""

    uid: str
    messages: Sequence[Message]
    response: str
    criteria: Sequence[Criterion]


class Grader(Protocol):
    """Failures become unknown verdicts (None), never a made-up value; the order of items and criteria is kept."""

    def grade(self, items: Sequence[GradeItem]) -> list[list[Verdict]]:
        """One list per item, one verdict per criterion of that item."""
