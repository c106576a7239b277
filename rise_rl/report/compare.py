"""Several runs on one page: curves, held-out rewards and criterion heat maps side by side.

Runs whose configurations agree in everything but `SAME_METHOD` are seeds of one method: curves show their mean and
range, heat maps count their answers together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from markupsafe import Markup

from ..errors import RiseError
from ..files import write_aside
from .compare_figures import PANELS, panel_svg
from .heatmap import HeatMap, Row, heat_map, topic_share
from .page import HTML_ROWS, heat_cell, heat_scale, render
from .summary import UNSET, RunData, flat

SAME_METHOD = {"name", "seed", "output", "trackers"}
"""Configuration keys in which the seeds of one method differ."""
COLUMNS = 8
"""Evaluations of a method that its heat map shows, first and last among them."""


class CompareError(RiseError):
    """These runs cannot stand side by side; the message says which and why."""


@dataclass(frozen=True)
class Group:
    """The runs of one method. apart: the settings that tell it from methods whose runs are called alike."""

    runs: list[RunData]
    apart: str = ""

    @property
    def name(self) -> str:
        """A run's own, or what the names begin with alike; with `apart` no other method's."""
        return ", ".join(filter(None, [self._common_name(), self.apart]))

    def _common_name(self) -> str:
        if len(self.runs) == 1:
            return self.runs[0].name
        names = [run.name for run in self.runs]
        alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names))
        common = "".join(letters[0] for letters in alike)
        stem = re.sub(r"([-_. ]+(seed|s))?[-_. ]*\d*$", "", common)
        distinct = len({run.config.get("seed") for run in self.runs}) == len(self.runs)
        return f"{stem or names[0]} ({len(self.runs)} {'seeds' if distinct else 'runs'})"

    @property
    def evals(self) -> list[dict[str, Any]]:
        return [evaluation for run in self.runs for evaluation in run.evals]


def write_comparison(folders: Sequence[str | Path], path: str | Path) -> Path:
    """Writes the page to `path` and returns it. It needs no network: figures and styles are inside it.

    Raises RunFolderError for a folder that is no run, CompareError for fewer than two runs, a folder given twice, and
    runs whose held-out evaluations are of different cohorts (prompts and criteria).
    """
    if len({Path(folder).resolve() for folder in folders}) < max(2, len(folders)):
        raise CompareError(
            f"compare: expected two or more different runs, found {', '.join(map(str, folders)) or 'none'}"
        )
    runs = [RunData.load(Path(folder)) for folder in folders]
    check_cohorts(runs)
    groups = group_runs(runs)
    figures = {name: panel_svg(name, groups) for name in PANELS}
    page = render(
        "compare.html.j2",
        groups=groups,
        panels=[(name, Markup(svg)) for name, svg in figures.items() if svg],
        rewards=reward_rows(groups),
        heat=heat_blocks(groups),
        differences=differences(groups),
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_aside(path, page)
    return path


def group_runs(runs: Sequence[RunData]) -> list[Group]:
    """In the order given; no two have one name."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        method = {key: value for key, value in run.config.items() if key not in SAME_METHOD}
        said = sorted(row for row in flat(method) if row[1] != UNSET)  # a key that an older version did not have
        groups.setdefault(repr(said), []).append(run)
    found = [Group(members) for members in groups.values()]
    return [replace(group, apart=_apart(group, [g for g in found if g.name == group.name])) for group in found]


def _apart(group: Group, same: Sequence[Group]) -> str:
    """The first settings of a group that no other of `same` has together: "engine.lr=1e-05"; empty if it is alone."""
    parts, others = [], [i for i, other in enumerate(same) if other is not group]
    [mine] = {*range(len(same))} - {*others}
    for key, values in differences(same):
        alike = [i for i in others if values[i] == values[mine]]
        if len(alike) < len(others):
            parts.append(f"{key}={values[mine]}")
            others = alike
    return ", ".join(parts)


def run_labels(runs: Sequence[RunData]) -> list[str]:
    """The runs' names; of runs of one name as much of the end of their folders as tells them apart."""

    def tail(run: RunData, length: int) -> str:
        return "/".join(run.folder.path.resolve().parts[-length:])

    def label(run: RunData) -> str:
        others = [other for other in runs if other.name == run.name and other is not run]
        if not others:
            return run.name
        folder = next(t for n in count(1) if (t := tail(run, n)) not in {tail(other, n) for other in others})
        return folder if folder.split("/")[-1] == run.name else f"{run.name} ({folder})"

    return [label(run) for run in runs]


def cohort(run: RunData) -> set[tuple[str, str, float, str]]:
    """(uid, criterion, weight, topic) of the run's first held-out evaluation; empty if there is none."""
    first: list[dict[str, Any]] = next((e["criteria"] for e in run.evals if e.get("criteria")), [])
    return {(str(c["uid"]), c["text"], c["weight"], str(c.get("topic"))) for c in first}


def check_cohorts(runs: Sequence[RunData]) -> None:
    cohorts = [(run, found) for run in runs if (found := cohort(run))]
    for run, found in cohorts[1:]:
        first, expected = cohorts[0]
        if found == expected:
            continue
        only = [(first, expected - found), (run, found - expected)]
        parts = [
            f"{len(extra)} criteria only in {owner.folder.path} "
            f"({'; '.join(f'{uid}: {text}' for uid, text, *_ in islice(sorted(extra), 2))})"
            for owner, extra in only
            if extra
        ]
        raise CompareError(
            f"{run.folder.path}: its held-out cohort is not that of {first.folder.path}: {', '.join(parts)}; evaluate "
            "both with the same data.heldout and evaluation.prompts"
        )


# --- tables ---------------------------------------------------------------------------------------------------------


def reward_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """A line per run, and one per method of several runs with the mean and range of its runs."""
    rows = []
    labels = iter(run_labels([run for group in groups for run in group.runs]))
    for group in groups:
        lines = [{"name": next(labels), **_reward_row(run)} for run in group.runs]
        if len(lines) > 1:
            columns = {key: [line[key] for line in lines if line[key] is not None] for key in NUMBERS}
            texts = {key: _mean_and_range(key, values) for key, values in columns.items()}
            rows.append({"name": group.name, "whole": True, "seed": "", "steps": "", **texts})
        else:
            lines[0]["name"] = group.name
        for line in lines:
            rows.append(line | {key: _number(key, line[key]) for key in NUMBERS} | {"whole": len(lines) == 1})
    return rows


NUMBERS = {"first": ".3f", "best": ".3f", "last": ".3f", "length": ".0f", "woken": ".0f"}
"""Columns of numbers, and how they are written."""


def _reward_row(run: RunData) -> dict[str, Any]:
    steps, rewards = run.eval_series("reward/mean")
    _, lengths = run.eval_series("length/mean")
    heat = heat_map(run.evals)
    woken, never = heat.woken(heat.steps[0], heat.steps[-1]) if heat else (None, None)
    best = max(range(len(rewards)), key=rewards.__getitem__) if rewards else None
    return {
        "seed": run.config.get("seed", ""),
        "steps": f"{len(run.steps)} of {run.config.get('steps', '?')}",
        "first": rewards[0] if rewards else None,
        "best": None if best is None else rewards[best],
        "best_step": None if best is None else steps[best],
        "last": rewards[-1] if rewards else None,
        "last_step": steps[-1] if steps else None,
        "length": lengths[-1] if lengths else None,
        "woken": woken,
        "never": never,
    }


def _number(key: str, value: float | None) -> str:
    return UNSET if value is None else format(value, NUMBERS[key])


def _mean_and_range(key: str, values: Sequence[float]) -> str:
    if not values:
        return UNSET
    mean = format(fmean(values), ".1f" if key == "woken" else NUMBERS[key])
    return f"{mean} ({_number(key, min(values))} to {_number(key, max(values))})"


def heat_blocks(groups: Sequence[Group]) -> dict[str, Any] | None:
    """One table: a line per criterion, a block of columns per method. None if no run was evaluated."""
    whole = heat_map([evaluation for group in groups for evaluation in group.evals])
    if whole is None:
        return None
    shown = whole.most_missed(HTML_ROWS)
    blocks = [(group.name, heat) for group in groups if (heat := heat_map(group.evals))]
    columns = [(name, heat, _rows_by_key(heat), _spread(heat.steps)) for name, heat in blocks]
    all_rows = dict(whole.topics())
    topics = []
    for topic, rows in shown.topics():
        lines = [
            {
                "row": row,
                "prompts": len(row.prompts),
                "cells": [heat_cell(found[_key(row)], step) for _, _, found, steps in columns for step in steps],
            }
            for row in rows
        ]
        shares = [
            topic_share([found[_key(row)] for row in all_rows[topic]], step)
            for _, _, found, steps in columns
            for step in steps
        ]
        topics.append({"name": topic, "lines": lines, "shares": ["" if s is None else f"{s:.0%}" for s in shares]})
    return {
        "blocks": [(name, steps) for name, _, _, steps in columns],
        "cut": any(len(steps) < len(heat.steps) for _, heat, _, steps in columns),
        "topics": topics,
        "left_out": shown.left_out,
        "scale": heat_scale(),
    }


def _key(row: Row) -> tuple[str, str, float]:
    return row.topic, row.text, row.weight


def _rows_by_key(heat: HeatMap) -> dict[tuple[str, str, float], Row]:
    return {_key(row): row for row in heat.rows}


def _spread(steps: Sequence[int]) -> list[int]:
    """At most COLUMNS of the steps, evenly, ends included."""
    if len(steps) <= COLUMNS:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (COLUMNS - 1))] for i in range(COLUMNS)]


def differences(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """(configuration key, its value in each method) where methods differ."""
    settings = [dict(flat(group.runs[0].config)) for group in groups]
    keys = dict.fromkeys(key for values in settings for key in values)
    rows = [(key, [values.get(key, UNSET) for values in settings]) for key in keys]
    return [(key, values) for key, values in rows if key.split(".")[0] not in SAME_METHOD and len(set(values)) > 1]
