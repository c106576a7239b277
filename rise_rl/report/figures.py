"""The report's figures, drawn by matplotlib: dark on white, colours that colour-blind readers can tell apart."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap, Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from ..phases import PHASES
from .heatmap import HeatMap, Row
from .summary import OTHER, RunData

# Okabe and Ito's palette.
BLUE, ORANGE, GREEN, PURPLE, GREY, INK = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#8A8F98", "#1F2430"
PHASE_COLOURS = {
    "rollout": "#0072B2",
    "guided_rollout": "#E69F00",
    "grade": "#CC79A7",
    "train": "#009E73",
    "sync": "#56B4E9",
    "evaluate": "#D55E00",
    "checkpoint": "#F0E442",
    OTHER: "#B8BDC6",
}
_REDS = matplotlib.colormaps["OrRd"]
HEAT: Colormap = ListedColormap([_REDS(0.92 * i / 255) for i in range(256)]).with_extremes(bad="#F1F2F4")
"""White to dark red; its lightness falls evenly, so it reads in grey too. Light grey where nothing was judged."""
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.edgecolor": "#9AA0AA",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E8EC",
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": "#4A505C",
    "ytick.color": "#4A505C",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "savefig.facecolor": "white",
}
Draw = Callable[[Axes, RunData], bool]
"""Draws on the axes; False if the run has nothing to draw."""


@contextmanager
def style(salt: str = "rise-rl") -> Iterator[None]:
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": salt}):  # type: ignore[arg-type]
        yield


def curve(axes: Axes, steps: Sequence[int], values: Sequence[float | None], colour: str, label: str, **kw: Any) -> bool:
    """A line through the values there are; a few of them also as dots, so that a single one can be seen."""
    known = [math.nan if v is None else v for v in values]
    count = sum(not math.isnan(v) for v in known)
    if count:
        kw.setdefault("marker", "o" if count <= 3 else None)
        axes.plot(steps, known, color=colour, label=label, markersize=kw.pop("markersize", 5), **kw)
    return count > 0


def faint(axes: Axes, steps: Sequence[int], values: Sequence[float | None], colour: str, label: str) -> bool:
    return curve(axes, steps, values, colour, label, alpha=0.35, linewidth=1.1)


def evaluations(axes: Axes, run: RunData, name: str) -> bool:
    steps, values = run.eval_series(name)
    return curve(axes, steps, values, GREEN, "held-out, no guidance", marker="D", markersize=5, linewidth=1.6)


# --- one panel each -------------------------------------------------------------------------------------------------


def draw_reward(axes: Axes, run: RunData) -> bool:
    axes.set_title("Reward")
    faint(axes, run.steps, run.series("reward/natural"), BLUE, "natural")
    curve(axes, run.steps, run.series("reward/natural_smoothed"), BLUE, "natural, smoothed")
    curve(axes, run.steps, run.series("reward/guided"), ORANGE, "guided", linewidth=1.3, alpha=0.8)
    return evaluations(axes, run, "reward/mean") or bool(axes.lines)


def draw_gap(axes: Axes, run: RunData) -> bool:
    axes.set_title("Reward gap, guided minus natural")
    drawn = faint(axes, run.steps, run.series("gap/raw"), PURPLE, "raw")
    curve(axes, run.steps, run.guided_gap, PURPLE, "smoothed")
    axes.axhline(0, color=GREY, linewidth=0.9)
    return drawn


def draw_entropy(axes: Axes, run: RunData) -> bool:
    axes.set_title("Entropy of the policy (nats)")
    return curve(axes, run.steps, run.series("entropy"), BLUE, "natural tokens")


def draw_kept(axes: Axes, run: RunData) -> bool:
    axes.set_title("Guided answers kept")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
    return curve(axes, run.steps, run.series("guided/kept_fraction"), ORANGE, "beat the natural mean", linewidth=1.6)


def draw_length(axes: Axes, run: RunData) -> bool:
    axes.set_title("Answer length (tokens)")
    drawn = curve(axes, run.steps, run.series("length/natural_mean"), BLUE, "natural", linewidth=1.6)
    curve(axes, run.steps, run.series("length/guided_mean"), ORANGE, "guided", linewidth=1.6)
    return evaluations(axes, run, "length/mean") or drawn


def draw_truncated(axes: Axes, run: RunData) -> bool:
    axes.set_title("Answers cut at the maximum length")
    drawn = curve(axes, run.steps, run.series("truncated/natural"), BLUE, "natural", linewidth=1.6)
    curve(axes, run.steps, run.series("truncated/guided"), ORANGE, "guided", linewidth=1.6)
    axes.yaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
    evaluated = evaluations(axes, run, "truncated")
    axes.set_ylim(0, 1.02)
    return evaluated or drawn


def draw_grad_norm(axes: Axes, run: RunData) -> bool:
    axes.set_title("Gradient norm, before clipping")
    drawn = curve(axes, run.steps, run.series("grad_norm"), BLUE, "grad norm", linewidth=1.6)
    axes.set_ylim(bottom=0)
    return drawn


def draw_time(axes: Axes, run: RunData) -> bool:
    axes.set_title("Step time by phase (seconds)")
    times, steps = run.phase_times(), run.steps
    width = max(1, math.ceil(len(steps) / 150))  # steps per bar
    starts = range(0, len(steps), width)
    base = [0.0] * len(starts)
    for phase, values in times.items():
        heights = [sum(values[i : i + width]) / len(values[i : i + width]) for i in starts]
        centres = [steps[i] + (width - 1) / 2 for i in starts]
        label, colour = PHASES.get(phase, phase), PHASE_COLOURS[phase]
        axes.bar(centres, heights, width * 0.86, bottom=base, color=colour, label=label, linewidth=0)
        base = [b + h for b, h in zip(base, heights)]
    axes.grid(axis="x", visible=False)
    return bool(times)


PANELS: dict[str, tuple[Draw, bool]] = {
    "reward": (draw_reward, True),
    "gap": (draw_gap, False),
    "entropy": (draw_entropy, False),
    "kept": (draw_kept, False),
    "grad_norm": (draw_grad_norm, False),
    "length": (draw_length, False),
    "truncated": (draw_truncated, False),
    "time": (draw_time, True),
}
"""The report's panels in order; True: as wide as the page."""


def finish(axes: Axes, run: RunData) -> None:
    """Step axis and s_switch, the same on every panel so that they can be read across."""
    first, last = step_axis(axes, [*run.steps, *(e["step"] for e in run.evals)])
    if run.last_guided_step is None:
        return
    switch = mark_switch(axes, run.last_guided_step, INK)
    right = switch < first + 0.7 * (last - first)
    axes.annotate(
        "guidance removed",
        (switch, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4 if right else -4, -2),
        textcoords="offset points",
        fontsize=8.5,
        va="top",
        ha="left" if right else "right",
        bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1},
    )


def step_axis(axes: Axes, steps: Sequence[int]) -> tuple[int, int]:
    """The x axis of steps; returns the first and the last."""
    first, last = min(steps, default=0), max(steps, default=0)
    margin = max(0.6, 0.015 * (last - first))
    axes.set_xlim(first - margin, last + margin)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10], min_n_ticks=1))
    return first, last


def mark_switch(axes: Axes, last_guided_step: int, colour: str) -> float:
    """The dashed line of s_switch; returns where it stands."""
    switch = last_guided_step + 0.5
    axes.axvline(switch, color=colour, linewidth=1.1, linestyle=(0, (4, 3)))
    return switch


def panel_svg(name: str, run: RunData) -> str | None:
    """Inline SVG of one panel, None if this run has nothing for it."""
    draw, wide = PANELS[name]
    with style(name):
        figure = Figure(figsize=(10.6, 3.9) if wide else (5.1, 3.3), layout="constrained")
        axes = figure.subplots()
        if not draw(axes, run):
            return None
        finish(axes, run)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            figure.legend(loc="outside lower left", ncols=8 if wide else 3, handlelength=1.4, columnspacing=1.2)
        return inline_svg(figure)


def inline_svg(figure: Figure) -> str:
    """Without XML head and fixed size, so that it fills the width it is given."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    head, body = svg.split(">", 1)
    return re.sub(r' (width|height)="[^"]*"', "", head) + ">" + body


def curves_figure(run: RunData) -> Figure:
    """Reward, gap, entropy and kept share on one sheet, for a README."""
    panels = [draw_reward, draw_gap, draw_entropy, draw_kept]
    figure = Figure(figsize=(11, 6.6), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1))
    grid = figure.subplots(2, 2)
    for axes, draw in zip(grid.flat, panels):
        if draw(axes, run):
            finish(axes, run)
            if len(axes.get_legend_handles_labels()[0]) > 1:
                axes.legend(loc="best")
        else:
            axes.set_axis_off()
            axes.text(0, 0.9, "nothing in this run", color=GREY)
    return figure


# --- heat map -------------------------------------------------------------------------------------------------------


def heat_colour(share: float) -> tuple[str, str]:
    """(background, text colour) as hex; of black and white text the one that stands out more, by WCAG's measure."""
    rgba = HEAT(float(share))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgba[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return to_hex(rgba), "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def heat_map_figure(heat: HeatMap) -> Figure:
    """For a README: topics in one column of panels, or two if there are many rows."""
    topics = heat.topics()
    sides = _split(topics) if len(heat.rows) > 24 and len(topics) > 1 else [topics]
    height = max(sum(len(rows) + 1.2 for _, rows in side) for side in sides)
    inches = 0.24 * height + 1.1
    figure = Figure(figsize=(6.4 * len(sides), inches), layout="constrained")
    grid = figure.subplots(1, len(sides), squeeze=False)[0]
    for axes, side in zip(grid, sides):
        _draw_side(axes, heat, side, height)
    bar = ScalarMappable(Normalize(0, 1), HEAT)
    colorbar = figure.colorbar(bar, ax=list(grid), location="bottom", fraction=0.12 / inches, aspect=50, pad=0.02)
    colorbar.ax.xaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
    colorbar.set_label("held-out answers that miss the criterion", fontsize=9)
    colorbar.ax.tick_params(labelsize=8.5)
    colorbar.outline.set_visible(False)
    return figure


def _split(topics: list[tuple[str, list[Row]]]) -> list[list[tuple[str, list[Row]]]]:
    """Two runs of whole topics, about equally long."""
    total = sum(len(rows) + 1.2 for _, rows in topics)
    left: list[tuple[str, list[Row]]] = []
    used = 0.0
    for topic in topics:
        if used + (len(topic[1]) + 1.2) / 2 > total / 2:
            break
        left.append(topic)
        used += len(topic[1]) + 1.2
    return [side for side in (left, topics[len(left) :]) if side]


def _draw_side(axes: Axes, heat: HeatMap, topics: Sequence[tuple[str, list[Row]]], height: float) -> None:
    ticks, labels, top = [], [], 0.0
    columns = [c - 0.5 for c in range(len(heat.steps) + 1)]
    for topic, rows in topics:
        axes.text(-0.5, top + 0.95, topic, fontweight="bold", fontsize=9, va="bottom")
        top += 1.2
        shares = [[math.nan if (s := row.share(step)) is None else s for step in heat.steps] for row in rows]
        lines = [top + i for i in range(len(rows) + 1)]
        axes.pcolormesh(columns, lines, shares, cmap=HEAT, vmin=0, vmax=1, edgecolors="white", linewidth=1.2)
        ticks += [line + 0.5 for line in lines[:-1]]
        labels += [f"{shorten(row.text, 40)}  ({row.weight:+g})" for row in rows]
        top += len(rows)
    axes.set_ylim(height, 0)
    axes.set_xlim(-0.5, len(heat.steps) - 0.5)
    axes.set_yticks(ticks, labels, fontsize=8.5)
    every = math.ceil(len(heat.steps) / 12)
    shown = range(0, len(heat.steps), every)
    axes.set_xticks(list(shown), [str(heat.steps[c]) for c in shown], fontsize=8.5)
    axes.set_xlabel("step of the evaluation", fontsize=9)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def shorten(text: str, limit: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"
