from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.image import imread

from rise_rl.report import write_figures, write_report
from rise_rl.report.figures import heat_colour
from rise_rl.report.heatmap import heat_map, topic_share
from rise_rl.report.summary import OTHER, RunData, duration
from rise_rl.run_folder import RunFolder, RunFolderError
from rise_rl.sft_config import SftConfig
from tests.run.synthetic import CRITERIA, create, evaluation, make_run

VOID = {"meta", "br", "img", "link", "input"}


class Page(HTMLParser):
    """Text by tag path, every attribute, and whether tags nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


def report(path: Path, **kw) -> tuple[str, Page]:
    make_run(path, **kw)
    html = write_report(path).read_text(encoding="utf-8")
    return html, Page(html)


def svgs(html: str) -> dict[str, ET.Element]:
    found = re.findall(r'aria-label="([^"]*)">(<svg.*?</svg>)', html, re.S)
    return {label: ET.fromstring(svg) for label, svg in found}


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> tuple[Path, str, Page]:
    path = tmp_path_factory.mktemp("runs") / "full"
    html, page = report(path, steps=20, switch=8)
    return path, html, page


def test_the_page_needs_no_network(full):
    _, html, page = full
    for tag, attributes in page.tags:
        assert tag not in {"script", "link", "iframe", "img"}
        for name in ("src", "href", "xlink:href", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith("#"), (tag, name, value)
    assert "@import" not in html
    assert set(re.findall(r"url\((.)", html)) <= {"#"}


def test_what_answers_and_prompts_contain_is_text_not_markup(full):
    _, html, page = full
    assert "<script" not in html
    assert "<script>alert(0)</script> & an answer" in page.text
    assert "travel & <food>" in page.text


def test_every_panel_is_there_and_is_well_formed(full):
    _, html, _ = full
    panels = svgs(html)
    names = ["reward", "gap", "entropy", "kept", "grad norm", "length", "truncated"]
    assert list(panels) == [*(f"{name} by step" for name in names), "step time by phase"]
    for svg in panels.values():
        assert "viewBox" in svg.attrib
        assert "width" not in svg.attrib
        assert "guidance removed" in "".join(svg.itertext())


def test_the_headline_figures(full):
    path, _, page = full
    run = RunData.load(path)
    first, last = run.evals[0]["reward/mean"], run.evals[-1]["reward/mean"]
    assert f"{first:.3f} → {last:.3f}" in page.text
    smoothed = run.series("reward/natural_smoothed")
    assert f"{smoothed[0]:.3f} → {smoothed[-1]:.3f}" in page.text
    assert "removed after step 8" in page.text
    kept, generated = sum(run.known("guided/kept")), sum(run.known("guided/generated"))
    assert f"{kept} of {generated} guided answers kept" in page.text
    assert "20 of 20" in page.text
    assert "finished" in page.text
    assert "unfinished" not in page.text


def test_the_time_table_adds_up(full):
    path, _, page = full
    run = RunData.load(path)
    times = run.phase_times()
    clock = sum(run.known("time/step")) + sum(run.known("time/checkpoint"))
    assert sum(sum(values) for values in times.values()) == pytest.approx(clock)
    assert sum(times[OTHER]) == pytest.approx(0.2 * 20)
    assert duration(clock) in page.text
    assert [duration(s) for s in (0.04, 99.0, 150.0, 7200.0)] == ["0.0 s", "99.0 s", "2.5 min", "2.0 h"]


def test_trouble_is_counted(full):
    path, _, _ = full
    rows = {what: count for what, count, _ in RunData.load(path).trouble_rows()}
    assert rows["unknown verdicts, training"] == "1"
    assert rows["ungraded samples"] == "1"
    assert rows["groups without advantage"] == "20"
    assert rows["criteria left out of hints"] == "–"
    assert rows["largest log-prob gap"] == "2e-05"


def test_the_heat_map_adds_up_prompts_and_keeps_topics_together():
    heat = heat_map([evaluation(0, 0.0), evaluation(7, 0.5), {"step": 9, "criteria": None}])
    assert heat is not None
    assert heat.steps == [0, 7]
    assert [(r.topic, r.text, r.weight) for r in heat.rows] == [(t, c, w) for t in CRITERIA for c, w in CRITERIA[t]]
    for row in heat.rows:
        for step, done in ((0, 0.0), (7, 0.5)):
            entries = [
                e for e in evaluation(step, done)["criteria"] if (e["topic"], e["text"]) == (row.topic, row.text)
            ]
            assert len(entries) == 2
            assert row.share(step) == sum(e["failures"] for e in entries) / 16
    topic, rows = heat.topics()[0]
    assert topic == "health"
    assert topic_share(rows, 7) == sum(r.failures[7] for r in rows) / (16 * len(rows))
    assert heat_map([]) is None


def test_a_criterion_nobody_could_judge_has_no_colour():
    record = evaluation(0, 0.0)
    for entry in record["criteria"]:
        if entry["text"] == "mention the rain":
            entry |= {"failures": 0, "samples": 0}
    heat = heat_map([record])
    assert heat is not None
    shares = {r.text: r.share(0) for r in heat.rows}
    assert shares["mention the rain"] is None
    assert shares["let a dog appear"] is not None


def test_many_criteria_are_cut_to_the_most_missed():
    heat = heat_map([evaluation(0, 0.0), evaluation(5, 1.0)])
    assert heat is not None
    cut = heat.most_missed(3)
    assert cut.left_out == len(heat.rows) - 3
    most = sorted((abs(r.weight) * r.failures[0] for r in heat.rows), reverse=True)[:3]
    assert sorted((abs(r.weight) * r.failures[0] for r in cut.rows), reverse=True) == most
    assert [r.text for r in cut.rows] == [r.text for r in heat.rows if r.text in {c.text for c in cut.rows}]


def test_cells_show_the_counts_in_readable_colours(full):
    path, html, _ = full
    heat = heat_map(RunData.load(path).evals)
    assert heat is not None
    row = heat.rows[0]
    cells = re.search(r"mention drinking water.*?</tr>", html, re.S)
    assert cells is not None
    shown = re.findall(r'style="background:(#\w+);color:(#\w+)">([\d.]+)</td>', cells[0])
    assert [float(text) for *_, text in shown] == [row.failures[s] for s in heat.steps]
    for share in (0, 0.25, 0.5, 0.75, 1):
        light, dark = sorted((luminance(c) for c in heat_colour(share)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 4.5  # WCAG AA


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_answers_are_shown_with_verdicts_and_hints(full):
    path, html, page = full
    assert "Step 1" in page.text
    assert "Step 20" in page.text
    assert "Step 2\n" not in page.text
    first = html[html.index("<h3>Step 1</h3>") : html.index("<h3>Step 20</h3>")]
    assert first.count("best guided answer") == 2
    assert "in the hint" in first
    assert "ungraded answer" not in first
    records = [r for r in RunFolder(path).rollouts(1) if r["uid"].startswith("story")]
    rewards = {kind: [r["reward"] for r in records if r["kind"] == kind] for kind in ("natural", "guided")}
    cells = re.findall(r"<h4>([\w ]+)</h4>\s*<div class=\"facts\">reward ([\d.]+)", first[first.index("story") :])
    assert cells == [
        ("best natural answer", f"{max(rewards['natural']):.3f}"),
        ("worst natural answer", f"{min(rewards['natural']):.3f}"),
        ("best guided answer", f"{max(rewards['guided']):.3f}"),
    ]
    last = html[html.index("<h3>Step 20</h3>") :]
    assert "guided answer" not in last
    # a met negative criterion is bad, a missed one good
    marks = re.findall(r'<li><span class="(\w+)">([\w ]+)</span><span>apologising', html)
    assert set(marks) <= {("bad", "met"), ("good", "not met"), ("unknown", "unknown")}
    assert marks


def test_configuration_and_manifest_are_there(full):
    path, _, page = full
    assert "guidance.plateau.window" in page.text
    assert "versions.torch" in page.text
    assert json.loads((path / "manifest.json").read_text())["versions"]["torch"] in page.text


@pytest.mark.parametrize(
    "kw, present, absent",
    [
        ({"steps": 0, "planned": 10, "every": 0}, ["No step is finished yet", "no held-out evaluation"], ["→"]),
        ({"steps": 1, "planned": 10}, ["1 of 10", "unfinished"], ["removed after"]),
        ({"steps": 7, "planned": 10, "guided": False}, ["plain rubric GRPO"], ["Guided answers kept", "removed after"]),
        ({"steps": 7, "every": 0}, ["no evaluation in this run", "7 of 7"], ["answers that miss it"]),
    ],
    ids=["no step", "one step", "no guidance", "no evaluation"],
)
def test_runs_that_lack_something(tmp_path, kw, present, absent):
    html, page = report(tmp_path / "run", **kw)
    for text in present:
        assert text in page.text
    for text in absent:
        assert text not in page.text
    assert ("reward by step" in svgs(html)) == (kw["steps"] > 0)
    if kw["steps"] <= 1:
        assert write_figures(tmp_path / "run", tmp_path / "figures")[0].stat().st_size > 5_000


def test_a_run_killed_in_the_middle_of_a_line_is_reported(tmp_path):
    make_run(tmp_path / "run", steps=6, planned=10)
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-40])
    (tmp_path / "run" / "manifest.json").unlink()
    assert "5 of 10" in Page(write_report(tmp_path / "run").read_text(encoding="utf-8")).text


def test_a_folder_that_is_no_run_is_an_error(tmp_path):
    with pytest.raises(RunFolderError, match="not a run folder"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_supervised_run_has_no_rewards_to_report(tmp_path):
    config = SftConfig.model_validate({"name": "s", "model": "m", "data": {"train": "train.jsonl"}})
    create(tmp_path / "run", config)
    with pytest.raises(RunFolderError, match="a run of `rise-rl sft`, which has no rewards to show"):
        write_report(tmp_path / "run")
    assert not (tmp_path / "run" / "report.html").exists()


def test_pictures_for_a_readme(full, tmp_path):
    path, _, _ = full
    files = write_figures(path, tmp_path / "figures")
    assert [f.name for f in files] == ["curves.png", "heatmap.png"]
    for file in files:
        pixels = imread(file)
        assert pixels.shape[1] > 900
        assert pixels[0, 0, :3] == pytest.approx([1, 1, 1])
        assert pixels[..., :3].std() > 0.05
