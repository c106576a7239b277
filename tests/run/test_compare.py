from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import yaml
from typer.testing import CliRunner

from rise_rl.cli import app
from rise_rl.report import write_comparison
from rise_rl.report.compare import CompareError, Group, group_runs, reward_rows, run_labels
from rise_rl.report.compare_figures import evaluated, mean_and_range
from rise_rl.report.heatmap import heat_map
from rise_rl.report.summary import RunData
from rise_rl.run_folder import RunFolder, RunFolderError
from tests.run.synthetic import CRITERIA, evaluation, make_run
from tests.run.test_report import Page


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three seeds of one method, one run of another."""
    root = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        make_run(root / f"rise-seed{seed}", steps=20, switch=8, seed=seed)
    make_run(root / "rubric", steps=15, planned=20, guided=False)
    return [root / f"rise-seed{seed}" for seed in range(3)] + [root / "rubric"]


@pytest.fixture(scope="module")
def html(folders, tmp_path_factory):
    return write_comparison(folders, tmp_path_factory.mktemp("page") / "deep" / "compare.html").read_text("utf-8")


def loaded(folders):
    return [RunData.load(folder) for folder in folders]


def test_the_page_needs_no_network_and_is_well_formed(html):
    page = Page(html)
    for tag, attributes in page.tags:
        assert tag not in {"script", "link", "iframe", "img"}
        for name in ("src", "href", "xlink:href", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith("#"), (tag, name, value)
    assert "@import" not in html
    assert "travel & <food>" in page.text


def test_seeds_of_a_method_are_one_group(folders):
    groups = group_runs(loaded(folders))
    assert [len(group.runs) for group in groups] == [3, 1]
    assert [group.name for group in groups] == ["rise (3 seeds)", "rubric"]
    assert len(group_runs(loaded(folders[::-1]))) == 2


@pytest.mark.parametrize(
    "names, shown",
    [
        (["rise-seed0", "rise-seed1"], "rise (2 seeds)"),
        (["rise-s10", "rise-s11"], "rise (2 seeds)"),
        (["m5_3", "m5_4"], "m5 (2 seeds)"),
        (["runs", "runs-again"], "runs (2 seeds)"),
        (["one", "two"], "one (2 seeds)"),
    ],
)
def test_a_method_is_called_what_its_runs_have_in_common(folders, names, shown):
    run = RunData.load(folders[0])
    assert Group([replace(run, config={"name": name, "seed": i}) for i, name in enumerate(names)]).name == shown


def other_config(folder, **changes):
    """A run whose file says other settings, given as section__key."""
    config = RunFolder(folder).config()
    for key, value in changes.items():
        section, name = key.split("__")
        config[section][name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def test_methods_whose_runs_are_called_alike_are_told_apart_by_what_differs(tmp_path):
    folders = [tmp_path / f"m{i}" / "mine" for i in range(5)]
    for folder in folders:
        make_run(folder, steps=1)
    other_config(folders[1], engine__lr=1e-3)
    other_config(folders[2], engine__lr=1e-3, guidance__gamma=0.3)
    other_config(folders[3], guidance__gamma=0.3)
    make_run(tmp_path / "m0" / "alone", steps=1)
    other_config(tmp_path / "m0" / "alone", guidance__gamma=0.7)
    names = [group.name for group in group_runs(loaded([*folders, tmp_path / "m0" / "alone"]))]
    assert names == [
        "mine (2 runs)",  # of one seed
        "mine, engine.lr=0.001, guidance.gamma=0.1",
        "mine, engine.lr=0.001, guidance.gamma=0.3",
        "mine, engine.lr=1e-06",
        "alone",
    ]
    html = write_comparison(folders, tmp_path / "c.html").read_text("utf-8")
    panel = re.search(r'aria-label="held-out reward by step">(<svg.*?</svg>)', html, re.S)
    assert panel is not None
    legend = [text.text for text in ET.fromstring(panel[1]).iter("{http://www.w3.org/2000/svg}text")]
    assert all(name in legend for name in names[:4])


def test_seeds_that_are_called_alike_in_two_methods_are_two_methods(tmp_path):
    for method in ("a", "b"):
        for seed in range(2):
            make_run(tmp_path / method / f"rise-seed{seed}", steps=1, seed=seed)
            other_config(tmp_path / method / f"rise-seed{seed}", guidance__gamma=0.1 if method == "a" else 0.2)
    folders = [tmp_path / method / f"rise-seed{seed}" for method in ("a", "b") for seed in range(2)]
    groups = group_runs(loaded(folders))
    assert [g.name for g in groups] == ["rise (2 seeds), guidance.gamma=0.1", "rise (2 seeds), guidance.gamma=0.2"]
    names = [row["name"] for row in reward_rows(groups)]
    assert names == [
        groups[0].name, "a/rise-seed0", "a/rise-seed1",
        groups[1].name, "b/rise-seed0", "b/rise-seed1",
    ]  # fmt: skip


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    folders = [tmp_path / "here" / "mine", tmp_path / "there" / "mine", tmp_path / "there" / "moved"]
    for folder in [*folders, tmp_path / "here" / "other"]:
        make_run(folder, steps=1)
    config = folders[2] / "config.yaml"
    config.write_text(config.read_text().replace("name: moved", "name: mine"))
    names = run_labels(loaded([*folders, tmp_path / "here" / "other"]))
    assert names == ["here/mine", "there/mine", "mine (moved)", "other"]


def test_a_key_that_an_older_version_did_not_know_makes_no_other_method(tmp_path):
    for name in ("new", "old"):
        make_run(tmp_path / name, steps=1)
    config = RunFolder(tmp_path / "old").config()
    assert config["grpo"].pop("dual_clip") is None
    (tmp_path / "old" / "config.yaml").write_text(yaml.safe_dump(config))
    assert len(group_runs(loaded([tmp_path / "new", tmp_path / "old"]))) == 1


def test_a_curve_is_the_mean_of_the_seeds_within_their_range(folders):
    runs = loaded(folders[:3])
    points = mean_and_range(runs, evaluated("reward/mean"))
    assert list(points) == [0, 5, 10, 15, 20]
    at_end = [run.evals[-1]["reward/mean"] for run in runs]
    assert len(set(at_end)) == 3
    assert points[20] == pytest.approx((sum(at_end) / 3, min(at_end), max(at_end)))
    assert mean_and_range(runs, lambda run: ([1, 2], [None, 4.0])) == {2: (4.0, 4.0, 4.0)}


def test_every_panel_names_both_methods_and_marks_the_switch(html):
    panels = dict(re.findall(r'aria-label="([^"]*) by step">(<svg.*?</svg>)', html, re.S))
    assert list(panels) == ["held-out reward", "natural reward", "gap", "entropy", "length", "held-out length"]
    for name, svg in panels.items():
        text = "".join(ET.fromstring(svg).itertext())
        assert "rise (3 seeds)" in text
        assert ("rubric" in text) == (name != "gap")  # it had no guided answers


def test_the_table_of_held_out_rewards(folders, html):
    whole, *seeds, other = reward_rows(group_runs(loaded(folders)))
    last = [run.evals[-1]["reward/mean"] for run in loaded(folders[:3])]
    assert whole["last"] == f"{sum(last) / 3:.3f} ({min(last):.3f} to {max(last):.3f})"
    assert [row["last"] for row in seeds] == [f"{x:.3f}" for x in last]
    assert [row["seed"] for row in seeds] == [0, 1, 2]
    assert other["steps"] == "15 of 20"
    text = re.sub(r"\s+", " ", Page(html).text)
    for row in (whole, *seeds, other):
        assert row["last"] in text


def test_best_is_the_highest_and_its_step_is_told(tmp_path):
    make_run(tmp_path / "a", steps=10)
    make_run(tmp_path / "b", steps=10)
    file = tmp_path / "a" / "evals.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[1]["reward/mean"] = 0.9
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = reward_rows([Group([RunData.load(tmp_path / "a")])])[0]
    assert (row["best"], row["best_step"]) == ("0.900", 5)
    html = write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "c.html").read_text("utf-8")
    assert '<td class="number" title="step 5">0.900</td>' in html


def test_heat_maps_stand_side_by_side_and_seeds_add_up(folders, html):
    rise = [e for folder in folders[:3] for e in RunData.load(folder).evals]
    pooled = heat_map(rise)
    assert pooled is not None
    assert pooled.steps == [0, 5, 10, 15, 20]
    row = next(r for r in pooled.rows if r.text == "mention drinking water")
    assert row.samples[20] == 3 * 2 * 8
    line = re.search(r"mention drinking water.*?</tr>", html, re.S)
    assert line is not None
    cells = re.findall(r'title="step (\d+): ([\d.]+) of (\d+) answers miss it"', line[0])
    assert [int(step) for step, *_ in cells] == [0, 5, 10, 15, 20, 0, 5, 10, 15]
    assert [int(n) for *_, n in cells] == [48] * 5 + [16] * 4
    assert float(cells[4][1]) == row.failures[20]
    heads = re.findall(r'colspan="(\d+)">([^<]*)<', html)
    assert heads == [("5", "rise (3 seeds)"), ("4", "rubric")]
    for texts in CRITERIA.values():
        assert all(f"{text} <span" in html for text, _ in texts)


def test_many_evaluations_are_thinned_to_first_last_and_some_between(tmp_path):
    for name in "ab":
        make_run(tmp_path / name, steps=30, every=1)
    html = write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "c.html").read_text("utf-8")
    assert 'colspan="8">' in html
    assert "not every evaluation is shown" in html


def test_criteria_never_met_at_the_start():
    start = evaluation(0, 0.0)
    later = evaluation(9, 1.0)
    wanted = {"let a dog appear": (8, 7), "mention the rain": (8, 8), "apologising": (8, None)}
    for record, which in ((start, 0), (later, 1)):
        for entry in record["criteria"]:
            entry["failures"] = wanted.get(entry["text"], (3, 3))[which]
            entry["samples"] = 0 if entry["failures"] is None else 8
    heat = heat_map([start, later])
    assert heat is not None
    assert [row.text for row in heat.never_met(0)] == ["apologising", "mention the rain", "let a dog appear"]
    assert heat.woken(0, 9) == (1, 2)  # "apologising", which nobody could judge, counts in neither number


def test_what_differs_is_told(html):
    table = html[html.index("<h2>What differs") :]
    keys = re.findall(r"<tr><td>([\w.]+)</td>", table)
    assert keys == ["guidance.enabled"]


def test_one_method_alone(folders, tmp_path):
    html = write_comparison(folders[:2], tmp_path / "c.html").read_text("utf-8")
    assert "Nothing but name and seed" in html


def test_runs_without_steps_or_evaluations(tmp_path):
    for name in "ab":
        make_run(tmp_path / name, steps=0, planned=5, every=0)
    text = Page(write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "c.html").read_text("utf-8")).text
    assert "No run has finished a step yet" in text
    assert "None of these runs has a held-out evaluation" in text


def test_mistakes_are_errors_and_leave_no_page(folders, tmp_path):
    page = tmp_path / "compare.html"
    with pytest.raises(RunFolderError, match="not a run folder"):
        write_comparison([folders[0], tmp_path], page)
    with pytest.raises(CompareError, match="two or more"):
        write_comparison(folders[:1], page)
    with pytest.raises(CompareError, match="two or more different"):
        write_comparison([folders[0], folders[0]], page)
    other = tmp_path / "other"
    make_run(other, steps=5)
    file = other / "evals.jsonl"
    file.write_text(file.read_text().replace("mention the rain", "mention the snow"))
    with pytest.raises(CompareError) as caught:
        write_comparison([*folders, other], page)
    message = str(caught.value)
    assert message.startswith(f"{other}: its held-out cohort is not that of {folders[0]}")
    assert "2 criteria only in" in message
    assert "story-0: mention the snow" in message
    assert not page.exists()


def test_the_command(folders, tmp_path):
    page = tmp_path / "c.html"
    done = CliRunner().invoke(app, ["compare", *map(str, folders), "--output", str(page)])
    assert done.exit_code == 0, done.output
    assert "rise (3 seeds)" in page.read_text("utf-8")
    done = CliRunner().invoke(app, ["compare", str(folders[0]), str(tmp_path / "nothing")])
    assert done.exit_code == 2
