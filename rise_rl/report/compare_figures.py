"""The comparison's curves: a line per method, the mean of its runs, within their range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from .figures import BLUE, GREEN, GREY, ORANGE, PURPLE, curve, inline_svg, mark_switch, step_axis, style
from .summary import RunData

if TYPE_CHECKING:
    from .compare import Group

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, "#E69F00", "#56B4E9", "#7A4B08", "#4A505C")
Series = Callable[[RunData], tuple[Sequence[int], Sequence[float | None]]]


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def logged(name: str) -> Series:
    return lambda run: (run.steps, run.series(name))


def evaluated(name: str) -> Series:
    return lambda run: run.eval_series(name)


PANELS: dict[str, tuple[str, Series]] = {
    "held-out reward": ("Held-out reward, no guidance", evaluated("reward/mean")),
    "natural reward": ("Natural reward in training, smoothed", logged("reward/natural_smoothed")),
    "gap": ("Reward gap, guided minus natural, smoothed", lambda run: (run.steps, run.guided_gap)),
    "entropy": ("Entropy of the policy (nats)", logged("entropy")),
    "length": ("Answer length in training (tokens)", logged("length/natural_mean")),
    "held-out length": ("Held-out answer length (tokens)", evaluated("length/mean")),
}


def mean_and_range(runs: Sequence[RunData], series: Series) -> dict[int, tuple[float, float, float]]:
    """{step: (mean, lowest, highest)} over the runs that have a value there."""
    values: dict[int, list[float]] = {}
    for run in runs:
        for step, value in zip(*series(run)):
            if value is not None:
                values.setdefault(step, []).append(value)
    return {step: (fmean(v), min(v), max(v)) for step, v in sorted(values.items())}


def panel_svg(name: str, groups: Sequence[Group]) -> str | None:
    """Inline SVG of one panel, None if no run has anything for it."""
    title, series = PANELS[name]
    with style(name):
        figure = Figure(figsize=(5.1, 3.3), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title)
        drawn = False
        for i, group in enumerate(groups):
            points = mean_and_range(group.runs, series)
            if not points:
                continue
            drawn = True
            steps, (means, lows, highs) = list(points), zip(*points.values())
            curve(axes, steps, means, colour(i), group.name, linewidth=1.7)
            if len(group.runs) > 1:
                axes.fill_between(steps, lows, highs, color=colour(i), alpha=0.18, linewidth=0)
            for switch in {run.last_guided_step for run in group.runs}:
                if switch is not None:
                    mark_switch(axes, switch, colour(i))
        if not drawn:
            return None
        if name == "gap":
            axes.axhline(0, color=GREY, linewidth=0.9)
        step_axis(
            axes, [step for group in groups for run in group.runs for step in (*run.steps, *run.eval_series("step")[0])]
        )
        beside = 2 if max(len(group.name) for group in groups) <= 30 else 1  # longer ones would be cut off
        figure.legend(loc="outside lower left", ncols=beside, handlelength=1.4, columnspacing=1.2)
        return inline_svg(figure)
