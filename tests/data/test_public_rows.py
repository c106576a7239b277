"""Real rows of public data sets, where the folder with them lies beside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from rise_rl.data import data_report, load_examples
from rise_rl.graders import GradeItem, RuleGrader, bands, route

SHARED = Path(__file__).parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the public rows beside the repository")

ROWS = {
    "healthbench_list_tags": (8, "rubrics"),
    "healthbench_dict_tags": (8, "rubrics"),
    "categorical_importance": (16, "rubrics"),
    "writingbench_banded": (20, "banded"),
    "dimension_weights": (10, "dimensions"),
    "ifeval": (541, "ifeval"),
    "ifbench": (300, "ifeval"),
    "rubrichub_schema": (6, "rubrics"),
}


def load(name):
    return load_examples(SHARED / f"{name}.jsonl")


@pytest.mark.parametrize("name", ROWS)
def test_every_file_with_rubrics_loads(name):
    count, fmt = ROWS[name]
    examples = load(name)
    assert len(examples) == count
    assert len({e.uid for e in examples}) == count
    assert {e.meta["format"] for e in examples} == {fmt}
    report = data_report(SHARED / f"{name}.jsonl")
    assert (report.rows, report.bad, report.repeated) == (count, [], 0)


@pytest.mark.parametrize("name", ["medqa_50", "arena_hard_v2_creative_40"])
def test_files_without_rubrics_say_so_once_for_all_rows(name):
    lines = data_report(SHARED / f"{name}.jsonl").text().splitlines()
    assert len(lines) == 2
    assert "expected a row of a known format" in lines[1]


@pytest.mark.parametrize("name", ["ifeval", "ifbench", "rubrichub_schema"])
def test_every_rule_grades_any_response(name):
    grader = RuleGrader()
    texts = [
        "",
        "1. Hello there!\n\n* a *b* ****** [x]\n***\n",
        "***",
        "12 ?! «",
        "\ud800 \x00",
        "Ünïcödé 日本。" * 50,
        '"',
    ]
    for example in load(name):
        rules = [c for c in example.rubric.criteria if route(c) == "rule"]
        verdicts = grader.grade([GradeItem(example.uid, example.messages, text, rules) for text in texts])
        assert all(verdict in (0.0, 1.0) for row in verdicts for verdict in row)
    assert not grader.failures


def test_the_two_tag_shapes_of_healthbench_agree():
    listed, objects = load("healthbench_list_tags"), load("healthbench_dict_tags")
    for examples in (listed, objects):
        weights = [c.weight for e in examples for c in e.rubric.criteria]
        assert any(w < 0 for w in weights)
        assert all(-10 <= w <= 10 for w in weights)
        assert all({"axis", "level"} <= set(c.tags) for e in examples for c in e.rubric.criteria)
        assert all(e.domain == "medical_chat" for e in examples)


def test_weights_per_dimension_add_up_to_one():
    for example in load("dimension_weights"):
        assert sum(c.weight for c in example.rubric.criteria) == pytest.approx(1.0, abs=0.02)


def test_bands_reach_the_judge():
    assert all(len(bands(c) or {}) == 5 for e in load("writingbench_banded") for c in e.rubric.criteria)


def test_the_five_rules_of_the_schema_rows_grade_as_written():
    examples = load("rubrichub_schema")
    bread = next(e for e in examples if "bread" in e.messages[0]["content"])
    response = "Yeast makes gas and gluten holds it. Enjoy the smell."
    worse = response.replace(" and", ", and") + " Bye."
    items = [GradeItem(bread.uid, bread.messages, text, bread.rubric.criteria) for text in (response, worse)]
    assert RuleGrader().grade(items) == [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
