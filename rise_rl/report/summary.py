"""What a report says in numbers, read from a run folder in whatever state it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ..phases import PHASES
from ..run_folder import RunFolder, RunFolderError
from ..sft_config import of_sft

OTHER = "other"
UNSET = "–"
"""How a value that is not there is written."""


class Card(NamedTuple):
    title: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class RunData:
    """metrics and evals: the lines of the run; `series` gives one name's values, None where a line has none."""

    folder: RunFolder
    config: dict[str, Any]
    manifest: dict[str, Any]
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]]

    @classmethod
    def load(cls, path: Path) -> RunData:
        """Raises RunFolderError if there is no run, or one without rewards."""
        folder = RunFolder(path)
        config = folder.config()
        if of_sft(config):
            raise RunFolderError(
                f"{path}: a run of `rise-rl sft`, which has no rewards to show; its losses are in metrics.jsonl and "
                "evals.jsonl, and `rise-rl eval` grades the answers of its model"
            )
        try:
            manifest = folder.manifest()
        except RunFolderError:  # killed before it was written; the report can do without
            manifest = {}
        return cls(folder, config, manifest, folder.metrics(), folder.evals())

    @property
    def name(self) -> str:
        return str(self.config.get("name", self.folder.path.name))

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.metrics]

    def series(self, name: str) -> list[float | None]:
        return [row.get(name) for row in self.metrics]

    def known(self, name: str) -> list[float]:
        return [v for v in self.series(name) if v is not None]

    def eval_series(self, name: str) -> tuple[list[int], list[float]]:
        pairs = [(e["step"], e[name]) for e in self.evals if e.get(name) is not None]
        return [s for s, _ in pairs], [v for _, v in pairs]

    @property
    def last_guided_step(self) -> int | None:
        """The step after which guidance was removed; None if it never was (or never was on)."""
        active = [row["step"] for row in self.metrics if row.get("guidance/active")]
        return active[-1] if active and active[-1] < self.steps[-1] else None

    @property
    def finished(self) -> bool:
        return bool(self.steps) and self.steps[-1] >= self.config.get("steps", float("inf"))

    @property
    def guided_gap(self) -> list[float | None]:
        """The smoothed gap while there are guided answers; afterwards its value only repeats."""
        active = self.series("guidance/active")
        return [v if on else None for v, on in zip(self.series("gap/smoothed"), active)]

    # --- time ------------------------------------------------------------------------------------------------------

    def phase_times(self) -> dict[str, list[float]]:
        """Seconds per step of each phase that took any, `other` being the rest of the step by the clock. Saving happens
        between steps, so it is not part of the step's own time.
        """
        times = {p: [row.get(f"time/{p}") or 0.0 for row in self.metrics] for p in PHASES}
        inside = [sum(times[p][i] for p in PHASES if p != "checkpoint") for i in range(len(self.metrics))]
        times[OTHER] = [max((row.get("time/step") or 0.0) - spent, 0.0) for row, spent in zip(self.metrics, inside)]
        return {phase: values for phase, values in times.items() if sum(values) > 0}

    # --- what the page shows -----------------------------------------------------------------------------------------

    def cards(self) -> list[Card]:
        steps, planned = len(self.metrics), self.config.get("steps")
        seconds = sum(sum(values) for values in self.phase_times().values())
        return [
            self._heldout_card(),
            Card("natural reward, smoothed", *_change(self.known("reward/natural_smoothed"), "first to last step")),
            self._guidance_card(),
            Card("steps", f"{steps} of {planned}", "finished" if self.finished else "unfinished"),
            Card("time", duration(seconds), f"{duration(seconds / steps)} per step" if steps else ""),
        ]

    def _heldout_card(self) -> Card:
        steps, rewards = self.eval_series("reward/mean")
        if not rewards:
            return Card("held-out reward", "–", "no evaluation in this run")
        best = max(range(len(rewards)), key=rewards.__getitem__)
        value, note = _change(rewards, f"step {steps[0]} to step {steps[-1]}")
        if len(rewards) > 1:
            note += f"; best {rewards[best]:.3f} at step {steps[best]}"
        return Card("held-out reward, no guidance", value, note)

    def _guidance_card(self) -> Card:
        generated, kept = sum(self.known("guided/generated")), sum(self.known("guided/kept"))
        if not any(self.series("guidance/active")):
            return Card("guidance", "off", "plain rubric GRPO" if self.metrics else "")
        last = self.last_guided_step
        state = "on" if last is None else f"removed after step {last}"
        return Card("guidance", state, f"{kept:.0f} of {generated:.0f} guided answers kept")

    def time_rows(self) -> list[tuple[str, str, str, str]]:
        """(phase, total, per step, share)."""
        times = {phase: sum(values) for phase, values in self.phase_times().items()}
        total, steps = sum(times.values()), len(self.metrics)
        rows = [(PHASES.get(p, p), duration(t), duration(t / steps), f"{t / total:.0%}") for p, t in times.items()]
        return [*rows, ("all", duration(total), duration(total / steps), "100%")] if rows else []

    def trouble_rows(self) -> list[tuple[str, str, str]]:
        """(what, how much, what it means). Zeros are shown too: that nothing went wrong is worth reading."""
        unknown = sum(e.get("unknown_verdicts") or 0 for e in self.evals)
        return [
            ("unknown verdicts, training", self._count("unknown_verdicts"), "criteria the grader could not judge"),
            ("unknown verdicts, evaluation", f"{unknown:.0f}", "the same on held-out answers"),
            ("ungraded samples", self._count("ungraded_samples"), "left out of group statistics, filter and loss"),
            ("truncated natural answers", self._share("truncated/natural"), "cut at the maximum length"),
            ("truncated guided answers", self._share("truncated/guided"), "cut at the maximum length"),
            ("groups without advantage", self._count("groups/zero_advantage"), "all answers of a prompt earn the same"),
            ("prompts without a hint", self._count("guided/no_feedback_prompts"), "nothing missed, or no hint fits"),
            ("criteria left out of hints", self._count("guided/dropped_criteria"), "the hint's budget was full"),
            ("largest log-prob gap", self._largest("logprob_gap/max"), "rollout engine against trainer, nats"),
        ]

    def _count(self, name: str) -> str:
        known = self.known(name)
        return f"{sum(known):.0f}" if known else "–"

    def _share(self, name: str) -> str:
        known = self.known(name)
        return f"{fmean(known):.1%}" if known else "–"

    def _largest(self, name: str) -> str:
        known = self.known(name)
        return f"{max(known):.2g}" if known else "–"


def _change(values: list[float], note: str) -> tuple[str, str]:
    if not values:
        return "–", "no step finished yet"
    if len(values) == 1:
        return f"{values[0]:.3f}", "one value so far"
    return f"{values[0]:.3f} → {values[-1]:.3f}", note


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Rows (dotted key, value as text) of nested settings."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            rows += flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", UNSET if value is None else str(value)))
    return rows
