"""When guidance is on, and when it is removed for good (paper section 3.4 and eq. 13)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .plateau import PlateauRule


@dataclass(frozen=True)
class GuidanceSchedule:
    """remove_at: "never", "plateau" (of the gap, by `rule`), or the number of guided steps s_switch."""

    enabled: bool
    remove_at: int | Literal["never", "plateau"]
    rule: PlateauRule

    def switch_step(self, gaps: Sequence[float | None]) -> int | None:
        """s_switch as far as it is known from the gaps of the finished steps: the first step without guidance.

        gaps: Delta_r of steps 0, 1, ..., raw (None: no prompt had guided rollouts).
        """
        if isinstance(self.remove_at, int):
            return self.remove_at
        return self.rule.switch_step(gaps) if self.remove_at == "plateau" else None

    def active(self, step: int, gaps: Sequence[float | None]) -> bool:
        """Whether step `step` (from 0) generates guided rollouts, given the gaps of the steps before it."""
        if not self.enabled:
            return False
        switch = self.switch_step(gaps)
        return switch is None or step < switch
