"""A judge over labelled rows, against figures worked out by hand."""

import json

import pytest

from rise_rl.data import DataError
from rise_rl.graders.judge_check import as_lines, judge_check
from rise_rl.graders.llm import JudgeConfig, LlmGrader
from tests.graders.fake_server import FakeJudge, Reply, criteria_of, honest, score, truth


class Scripted:
    """Verdicts by criterion, one list per repeat."""

    def __init__(self, *repeats):
        self.repeats = iter(repeats)

    def grade(self, items):
        verdicts = next(self.repeats)
        return [[verdicts[item.criteria[0].text]] for item in items]


def labelled(tmp_path, by_criterion, **more):
    path = tmp_path / "labels.jsonl"
    rows = [{"prompt": "Hi", "response": "r", "criterion": c, "label": v, **more} for c, v in by_criterion.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_figures_by_hand(tmp_path):
    path = labelled(tmp_path, {"a": True, "b": "met", "c": 1, "d": False, "e": "not_met"})
    first = {"a": 1.0, "b": 1.0, "c": 0.0, "d": 0.0, "e": 1.0}
    second = {"a": 1.0, "b": None, "c": 0.0, "d": 0.0, "e": 0.0}
    check = judge_check(path, Scripted(first, second), repeats=2)
    assert (check.rows, check.repeats, check.tied) == (5, 2, 0)
    assert check.unknown_rate == pytest.approx(1 / 10)
    # known pairs (label, verdict): (1,1) x3, (1,0) x2, (0,0) x3, (0,1) x1
    assert check.confusion == {(1.0, 1.0): 3, (1.0, 0.0): 2, (0.0, 0.0): 3, (0.0, 1.0): 1}
    assert check.agreement == pytest.approx(6 / 9)
    # met: precision 3/4, recall 3/5, F1 2/3; not met: precision 3/5, recall 3/4, F1 2/3
    assert check.macro_f1 == pytest.approx(2 / 3)
    # by chance: (5 * 4 + 4 * 5) / 81
    assert check.kappa == pytest.approx((6 / 9 - 40 / 81) / (1 - 40 / 81))
    assert check.stability == pytest.approx(3 / 5)
    assert [(d.row, d.criterion, d.label) for d in check.disagreements] == [(3, "c", 1.0), (5, "e", 0.0)]
    lines = as_lines(check)
    assert any("66.7%" in line for line in lines)
    assert "labelled met:     judged 3 met, 2 not met" in lines
    assert "labelled not met: judged 1 met, 3 not met" in lines
    assert lines[-3:] == [
        "2 rows judged against their label:",
        "  row 3: labelled met, judged not met, not met: c",
        "  row 5: labelled not met, judged met, not met: e",
    ]


def test_graded_labels(tmp_path):
    path = labelled(tmp_path, {"a": 0.5, "b": 1.0})
    check = judge_check(path, Scripted({"a": 1.0, "b": 1.0}), repeats=1)
    assert check.agreement == pytest.approx(0.75)
    assert (check.macro_f1, check.kappa, check.stability) == (None, None, None)


def test_a_row_that_stays_unknown_is_not_stable(tmp_path):
    runs = [{"a": 1.0, "b": None, "c": 0.0}] * 2
    check = judge_check(labelled(tmp_path, {"a": 1, "b": 1, "c": 0}), Scripted(*runs), repeats=2)
    assert check.stability == pytest.approx(2 / 3)


def test_only_the_first_disagreements_are_shown(tmp_path):
    names = "abcdefg"
    check = judge_check(labelled(tmp_path, dict.fromkeys(names, 1)), Scripted(dict.fromkeys(names, 0.5)), repeats=1)
    lines = as_lines(check)
    assert lines[-6] == "7 rows judged against their label, the first 5:"
    assert lines[-1] == "  row 5: labelled met, judged 0.50: e"


def test_nothing_known(tmp_path):
    check = judge_check(labelled(tmp_path, {"a": 1}), Scripted({"a": None}), repeats=1)
    assert (check.agreement, check.unknown_rate, check.kappa) == (None, 1.0, None)
    assert as_lines(check)


def test_a_judge_is_asked_anew_at_every_repeat(tmp_path):
    path = labelled(tmp_path, {c: truth(c) for c in "abcdef"})
    counts = {}

    def fickle(request):
        text = criteria_of(request)[0][1]
        counts[text] = counts.get(text, 0) + 1
        if text == "c" and counts[text] == 2:
            return Reply(json.dumps({"criteria_met": not truth("c")}))
        return honest(request)

    with FakeJudge(fickle) as server:
        config = JudgeConfig(base_urls=(server.url,), cache_dir=tmp_path / "cache")
        with LlmGrader(config) as judge:
            check = judge_check(path, judge, repeats=3)
        assert set(counts.values()) == {3}
        assert check.agreement == pytest.approx(17 / 18)
        assert check.stability == pytest.approx(5 / 6)
        assert check.stats["calls"] == 18
        assert any("18 calls (0 verdicts from the cache), 1800 tokens in, 180 out" in line for line in as_lines(check))
        with LlmGrader(config) as judge:
            assert judge_check(path, judge, repeats=3).agreement == check.agreement
        assert len(server.requests) == 18, "a second check is answered from the cache, repeat by repeat"


def test_meta_evaluation_rows_of_healthbench(tmp_path):
    path = tmp_path / "meta.jsonl"
    row = {"prompt": [{"role": "user", "content": "Hi"}], "completion": "Hello", "rubric": "greets"}
    rows = [{**row, "binary_labels": labels} for labels in ([True, True, False], [True, False], [False])]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    check = judge_check(path, Scripted({"greets": 1.0}), repeats=1)
    assert (check.rows, check.tied, check.agreement) == (2, 1, 0.5)


def test_banded_rows_are_scored(tmp_path):
    path = labelled(tmp_path, {"a": (score("a") - 1) / 9}, bands={"1-2": "bad", "9-10": "good"})
    with FakeJudge() as server, LlmGrader(JudgeConfig(base_urls=(server.url,))) as judge:
        assert judge_check(path, judge, repeats=1).agreement == pytest.approx(1.0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"label": "perhaps"}, r"labels\.jsonl, row 1, label: expected true.*found 'perhaps'"),
        ({"label": None}, "row 1, label: expected one of label, labels, binary_labels, found none"),
        ({"labels": [True]}, "found label, labels"),
        ({"label": 1.5}, "found 1.5"),
        ({"criterion": ""}, "row 1, criterion"),
        ({"response": None}, "expected one of response, completion, found none"),
    ],
)
def test_bad_rows_are_named(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        judge_check(labelled(tmp_path, {"a": True}, **change), Scripted({"a": 1.0}), repeats=1)


def test_repeats_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="repeats: expected at least 1, found 0"):
        judge_check(labelled(tmp_path, {"a": True}), Scripted(), repeats=0)
