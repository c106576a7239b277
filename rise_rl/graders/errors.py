"""What a person can mend about graders."""

from __future__ import annotations

from ..errors import RiseError


class GraderError(RiseError, ValueError):
    """A grader, its options or its files cannot be used; the message says which and what was expected."""


class JudgeUnavailable(RiseError, RuntimeError):
    """The judge is plainly down or wrongly set up; going on would only collect unknown verdicts."""
