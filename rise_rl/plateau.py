"""When the reward gap has stopped moving: the rule that ends guidance (paper eq. 13; docs/math.md, "Plateau rule")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict, Field

SMOOTHING = 0.9
"""Weight of the past in every smoothed curve: about the last ten steps."""


def smooth(previous: float | None, value: float | None) -> float | None:
    """One step of an exponential moving average that starts at the first value and holds through missing ones."""
    if value is None or previous is None:
        return previous if value is None else value
    return SMOOTHING * previous + (1 - SMOOTHING) * value


def smoothed(values: Iterable[float | None]) -> list[float | None]:
    """The moving average after each value; None until the first one that exists."""
    curve: list[float | None] = []
    for value in values:
        curve.append(smooth(curve[-1] if curve else None, value))
    return curve


class PlateauRule(BaseModel):
    """Guidance ends once the smoothed gap has set neither a new peak nor a new low since that peak, by more than
    `tolerance`, for `window` steps. The same gaps give the same answer online and afterwards.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    window: int = Field(20, ge=1, description="Steps without a new peak or low of the smoothed gap that end guidance.")
    tolerance: float = Field(0.01, ge=0, description="Smallest change of the smoothed gap that counts, in reward.")

    def switch_step(self, gaps: Sequence[float | None]) -> int | None:
        """s_switch: the first step that generates no guided rollouts, or None while the gap still moves.

        gaps: Delta_r of steps 0, 1, ..., raw; None where no prompt had guided rollouts (no evidence: not counted in the
        window). Whether the answer is s + 1 depends on gaps[: s + 1] only.
        """
        peak = low = None
        still = 0
        for step, (raw, gap) in enumerate(zip(gaps, smoothed(gaps))):
            if raw is None or gap is None:
                continue
            if peak is None or low is None or gap > peak + self.tolerance:
                peak = low = gap
                still = 0
            elif gap < low - self.tolerance:
                low = gap
                still = 0
            else:
                still += 1
            if still == self.window:
                return step + 1
        return None
