"""report.html and the README's pictures."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..files import write_aside
from .figures import PANELS, curves_figure, heat_colour, heat_map_figure, panel_svg, style
from .heatmap import HeatMap, Row, heat_map, topic_share
from .summary import RunData, flat

HTML_ROWS, PICTURE_ROWS = 200, 60
PROMPTS_SHOWN = 2
"""Prompts of the first and of the last step whose answers are shown."""


def write_report(run: str | Path) -> Path:
    """Writes RUN/report.html from what the run has left so far and returns its path. Raises RunFolderError if there is
    no run. The page needs no network: figures and styles are inside it.
    """
    data = RunData.load(Path(run))
    heat = heat_map(data.evals)
    figures = {name: panel_svg(name, data) for name in PANELS}
    page = render(
        "report.html.j2",
        run=data,
        cards=data.cards(),
        panels=[(name, PANELS[name][1], Markup(svg)) for name, svg in figures.items() if svg and name != "time"],
        time_panel=Markup(figures["time"]) if figures["time"] else None,
        times=data.time_rows(),
        trouble=data.trouble_rows(),
        heat=heat_table(heat) if heat else None,
        samples=[sample_step(data, step) for step in _first_and_last(data.folder.rollout_steps())],
        config=flat(data.config),
        manifest=flat(data.manifest),
    )
    path = data.folder.path / "report.html"
    write_aside(path, page)
    return path


def render(template: str, **values: Any) -> str:
    """A page of this folder's templates, values escaped."""
    environment = Environment(loader=PackageLoader("rise_rl.report", "."), autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    written = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return environment.get_template(template).render(written=written, **values)


def write_figures(run: str | Path, folder: str | Path) -> list[Path]:
    """Saves curves.png and, if the run has evaluations, heatmap.png to `folder`; returns what was written."""
    data, folder = RunData.load(Path(run)), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with style():
        figures = {"curves.png": curves_figure(data)}
        if heat := heat_map(data.evals):
            figures["heatmap.png"] = heat_map_figure(heat.most_missed(PICTURE_ROWS))
        for name, figure in figures.items():
            figure.savefig(folder / name, dpi=150, metadata={"Software": None})
    return [folder / name for name in figures]


def heat_table(whole: HeatMap) -> dict[str, Any]:
    """What the template needs, with colours and texts worked out. A topic's shares are over all its criteria, those
    that are left out included.
    """
    heat, all_rows = whole.most_missed(HTML_ROWS), dict(whole.topics())
    sizes = {row.samples.get(step, 0) for row in heat.rows for step in heat.steps}
    topics = []
    for topic, rows in heat.topics():
        lines = []
        for row in rows:
            cells = [heat_cell(row, step) for step in heat.steps]
            lines.append({"row": row, "cells": cells, "prompts": len(row.prompts)})
        shares = [topic_share(all_rows[topic], step) for step in heat.steps]
        topics.append({"name": topic, "lines": lines, "shares": ["" if s is None else f"{s:.0%}" for s in shares]})
    return {
        "steps": heat.steps,
        "topics": topics,
        "left_out": heat.left_out,
        "answers": sizes.pop() if len(sizes) == 1 else None,
        "scale": heat_scale(),
    }


def heat_cell(row: Row, step: int) -> dict[str, Any]:
    """Text, colours and title of one criterion at one evaluation."""
    share = row.share(step)
    if share is None:
        return {"text": "", "colours": None, "title": f"step {step}: no answer judged"}
    count = f"{row.failures[step]:.3g}"
    title = f"step {step}: {count} of {row.samples[step]} answers miss it"
    return {"text": count, "colours": heat_colour(share), "title": title}


def heat_scale() -> list[tuple[str, str]]:
    return [(f"{share:.0%}", heat_colour(share)[0]) for share in (0, 0.2, 0.4, 0.6, 0.8, 1)]


def _first_and_last(steps: Sequence[int]) -> list[int]:
    return [steps[0], steps[-1]] if len(steps) > 1 else list(steps)


def sample_step(data: RunData, step: int) -> dict[str, Any]:
    """The first prompts of a step, those with guided answers before others: best and worst natural, best guided."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in data.folder.rollouts(step):
        groups.setdefault(record["uid"], []).append(record)
    with_guided = [uid for uid, records in groups.items() if any(r["kind"] == "guided" for r in records)]
    chosen = list(dict.fromkeys([*with_guided, *groups]))[:PROMPTS_SHOWN]
    return {"step": step, "prompts": [_prompt(groups[uid]) for uid in chosen]}


def _prompt(records: list[dict[str, Any]]) -> dict[str, Any]:
    graded = sorted((r for r in records if r["reward"] is not None), key=lambda r: r["reward"], reverse=True)
    natural = [r for r in graded if r["kind"] == "natural"]
    guided = [r for r in graded if r["kind"] == "guided"]
    picks = [("best natural answer", natural[0])] if natural else []
    if len(natural) > 1:
        picks.append(("worst natural answer", natural[-1]))
    if guided:
        picks.append(("best guided answer", guided[0]))
    if not picks:
        picks.append(("ungraded answer", records[0]))
    return {
        "uid": records[0]["uid"],
        "prompt": records[0]["prompt"],
        "answers": [{"title": title, "record": r, "verdicts": _verdicts(r)} for title, r in picks],
    }


def _verdicts(record: dict[str, Any]) -> list[dict[str, Any]]:
    """One mark per criterion. good: as the rubric wants it (a negative criterion wants to be missed), None: unknown."""
    marks = []
    criteria = record.get("criteria") or [{}] * len(record["verdicts"])
    for k, (verdict, criterion) in enumerate(zip(record["verdicts"], criteria)):
        weight = criterion.get("weight")
        value = verdict if weight is None or verdict is None or weight > 0 else 1 - verdict
        word = "unknown" if verdict is None else {0.0: "not met", 1.0: "met"}.get(verdict, f"{verdict:.2f} met")
        marks.append(
            {
                "text": criterion.get("text") or f"criterion {k}",
                "weight": "" if weight is None else f"{weight:+g}",
                "word": word,
                "good": None if value is None else value >= 0.5,
                "shown": k in record["shown"],
            }
        )
    return marks
