"""Grading a file: the same rows with verdicts, all or nothing, and going on after a stop."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rise_rl.data import DataError, Example, load_examples
from rise_rl.graders import rule
from rise_rl.graders.errors import GraderError
from rise_rl.graders.grade_file import grade_file, grader_identity
from rise_rl.graders.llm import JudgeConfig, JudgeUnavailable, LlmGrader
from rise_rl.graders.routing import RoutingGrader
from rise_rl.graders.rule import RuleGrader
from rise_rl.rubric import Criterion, Rubric
from tests.graders.fake_server import FakeJudge, Reply, honest, truth, user_text

TEXTS = ("names tea", "is short", "is wrong")
RUBRIC = Rubric((Criterion(TEXTS[0], 2.0), Criterion(TEXTS[1], 1.0), Criterion(TEXTS[2], -3.0)))
EXAMPLES = [Example(f"q{i}", ({"role": "user", "content": f"Question {i}"},), RUBRIC, "") for i in range(4)]


class Recorder:
    """Judges by the response's text: "unknown" in it makes the second verdict unknown."""

    identity = "recorder"

    def __init__(self, fail_at=None):
        self.items, self.fail_at = [], fail_at

    def grade(self, items):
        if self.fail_at is not None and len(self.items) >= self.fail_at:
            raise JudgeUnavailable("down")
        self.items += items
        return [[1.0, None if "unknown" in i.response else 0.0, 1.0 if "bad" in i.response else 0.0] for i in items]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def responses(tmp_path, n=10):
    return write(tmp_path / "in.jsonl", [{"uid": f"q{i % 4}", "response": f"r{i}", "extra": i} for i in range(n)])


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_come_back_in_order_with_verdicts_score_and_reward(tmp_path):
    rows = [
        {"uid": "q1", "response": "good", "kept": {"a": [1]}},
        {"uid": "q0", "response": "bad", "reward": 0.123, "verdicts": ["old"]},
        {"uid": "q1", "response": "unknown é"},
    ]
    out = tmp_path / "deep" / "out.jsonl"
    summary = grade_file(write(tmp_path / "in.jsonl", rows), EXAMPLES, out, Recorder())
    first, second, third = read(out)
    assert (first["verdicts"], first["score"], first["reward"], first["kept"]) == ([1, 0, 0], 2 / 3, 2 / 3, {"a": [1]})
    assert (second["verdicts"], second["score"], second["reward"]) == ([1, 0, 1], -1 / 3, 0.0)
    assert (third["verdicts"], third["score"], third["reward"]) == ([1, None, 0], None, None)
    assert (summary.rows, summary.ungraded, summary.criteria, summary.unknown_verdicts) == (3, 1, 9, 1)
    assert summary.reward == pytest.approx(1 / 3)
    assert summary.score == pytest.approx(1 / 6)
    assert [p.name for p in out.parent.iterdir()] == ["out.jsonl"]


def test_a_stopped_run_goes_on_where_it_was(tmp_path):
    source, out = responses(tmp_path), tmp_path / "out.jsonl"
    with pytest.raises(JudgeUnavailable):
        grade_file(source, EXAMPLES, out, Recorder(fail_at=4), chunk_rows=2)
    assert not out.exists()
    partial = tmp_path / "out.jsonl.partial"
    partial.write_bytes(partial.read_bytes() + b'{"verdicts": [1.0, 0.')  # the kill came within a line
    second = Recorder()
    seen = []
    summary = grade_file(source, EXAMPLES, out, second, chunk_rows=2, progress=lambda done, n: seen.append((done, n)))
    assert [i.response for i in second.items] == [f"r{i}" for i in range(4, 10)]
    assert summary.reused == 4
    assert seen == [(4, 10), (6, 10), (8, 10), (10, 10)]
    whole = tmp_path / "whole.jsonl"
    grade_file(source, EXAMPLES, whole, Recorder())
    assert out.read_text() == whole.read_text()
    assert not partial.exists()


def test_a_second_run_asks_only_about_rows_that_stayed_ungraded_or_changed(tmp_path):
    source, out = responses(tmp_path), tmp_path / "out.jsonl"
    rows = read(source)
    rows[3]["response"] = "unknown"
    grade_file(write(source, rows), EXAMPLES, out, Recorder())
    rows[5]["response"] = "another"
    again = Recorder()
    assert grade_file(write(source, rows), EXAMPLES, out, again).reused == 8
    assert [i.response for i in again.items] == ["unknown", "another"]
    other_judge = Recorder()
    other_judge.identity = "other"
    assert grade_file(source, EXAMPLES, out, other_judge).reused == 0
    other_rubric = [Example(e.uid, e.messages, Rubric(RUBRIC.criteria[:2] + RUBRIC.criteria[:1]), "") for e in EXAMPLES]
    assert grade_file(source, other_rubric, out, Recorder()).reused == 0


def test_equal_rows_are_graded_once(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"uid": "q0", "response": "same"}] * 5)
    grader = Recorder()
    assert grade_file(source, EXAMPLES, tmp_path / "out.jsonl", grader).rows == 5
    assert len(grader.items) == 1
    assert len(read(tmp_path / "out.jsonl")) == 5


@pytest.mark.parametrize(
    "rows, message",
    [
        (
            [{"uid": "q0", "response": "r"}, {"uid": "nobody", "response": "r"}],
            r"in\.jsonl, row 2, uid: no rubric.*nobody",
        ),
        ([{"uid": "q0"}], r"row 1, response: expected text, found None"),
        ([{"uid": 3, "response": "r"}], r"row 1, uid: expected text, found 3"),
        ([[1]], r"row 1"),
        ([], "at least one row"),
    ],
)
def test_bad_rows_are_named_before_anything_is_graded(tmp_path, rows, message):
    grader = Recorder()
    with pytest.raises(DataError, match=message):
        grade_file(write(tmp_path / "in.jsonl", rows), EXAMPLES, tmp_path / "out.jsonl", grader)
    assert grader.items == []
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_half_a_surrogate_pair_is_written_as_it_was_read(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"uid": "q0", "response": "é \ud800"}])
    grade_file(source, EXAMPLES, tmp_path / "out.jsonl", Recorder())
    assert read(tmp_path / "out.jsonl")[0]["response"] == "é \ud800"
    assert "é" in (tmp_path / "out.jsonl").read_text(encoding="utf-8")


def test_a_file_of_another_kind_is_never_overwritten(tmp_path):
    source = responses(tmp_path)
    with pytest.raises(GraderError, match="would overwrite the responses"):
        grade_file(source, EXAMPLES, source, Recorder())
    other = write(tmp_path / "notes.jsonl", [{"note": "precious"}])
    with pytest.raises(GraderError, match="holds no graded rows"):
        grade_file(source, EXAMPLES, other, Recorder())
    assert read(other) == [{"note": "precious"}]
    text = tmp_path / "notes.jsonl"
    text.write_text("not JSON\nat all\n")
    with pytest.raises(GraderError, match=r"notes.jsonl, line 1: not JSON .*; name another output file"):
        grade_file(source, EXAMPLES, text, Recorder())
    assert text.read_text() == "not JSON\nat all\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "notes.jsonl"]


def test_rubrics_may_be_a_file(tmp_path):
    criterion = {"criterion": "greets", "points": 3, "tags": {"verifier": "llm"}}
    row = {
        "prompt": [{"role": "user", "content": "Hi"}],
        "data_source": "x",
        "ability": "chat",
        "reward_model": {"style": "rubric", "ground_truth": "", "rubrics": [criterion]},
        "extra_info": {"index": 0},
    }
    rubrics = write(tmp_path / "rubrics.jsonl", [row])
    [example] = load_examples(rubrics)
    source = write(tmp_path / "in.jsonl", [{"uid": example.uid, "response": "Hello"}])
    with FakeJudge() as server, LlmGrader(JudgeConfig(base_urls=(server.url,))) as judge:
        grade_file(source, rubrics, tmp_path / "out.jsonl", RoutingGrader(RuleGrader(), judge))
    assert read(tmp_path / "out.jsonl")[0]["reward"] == float(truth("greets"))


def test_identities_tell_graders_apart():
    def judge(**options):
        return LlmGrader(JudgeConfig(**options))

    routed = [RoutingGrader(RuleGrader(), j) for j in (judge(), judge(temperature=0.5), None)]
    names = [*map(grader_identity, routed), grader_identity(RuleGrader()), grader_identity(judge(model="m"))]
    assert len(set(names)) == len(names)
    assert grader_identity(judge()) == grader_identity(judge(concurrency=3, timeout_s=9, base_urls=("http://x/v1",)))


def test_rule_verdicts_carry_the_version_of_the_checks():
    assert grader_identity(RuleGrader()) == f"rule checks {rule.VERSION}"
    assert f"rule=rule checks {rule.VERSION}" in grader_identity(RoutingGrader(RuleGrader(), None))


@pytest.mark.slow  # starts and kills Python processes
def test_a_killed_process_loses_nothing_and_doubles_nothing(tmp_path):
    source, out = responses(tmp_path, 60), tmp_path / "out.jsonl"
    program = textwrap.dedent(
        """
        import sys
        from rise_rl.graders.grade_file import grade_file
        from rise_rl.graders.llm import JudgeConfig, LlmGrader
        from tests.graders.test_grade_file import EXAMPLES
        url, source, out, cache = sys.argv[1:]
        with LlmGrader(JudgeConfig(base_urls=(url,), cache_dir=cache, concurrency=4)) as grader:
            grade_file(source, EXAMPLES, out, grader, chunk_rows=8)
        """
    )
    root = Path(__file__).parents[2]
    allowed = 0  # beyond so many requests the judge does not answer, so that no process is done before it is killed

    def answer(request):
        number = len(server.requests)
        return Reply(honest(request).text, delay=0.02, until=lambda: number <= allowed)

    with FakeJudge(answer) as server:
        command = [sys.executable, "-c", program, server.url, str(source), str(out), str(tmp_path / "cache")]
        for allowed in (30, 80, 130):
            process = subprocess.Popen(command, cwd=root)
            while len(server.requests) < allowed and process.poll() is None:
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            assert not out.exists()
        allowed = 10_000
        subprocess.run(command, cwd=root, check=True, timeout=300)
        asked = [user_text(r) for r in server.requests]
    rows = read(out)
    assert [row["response"] for row in rows] == [f"r{i}" for i in range(60)]
    assert all(row["verdicts"] == [float(truth(t)) for t in TEXTS] for row in rows)
    assert len(set(asked)) == 180
    assert len(asked) <= 180 + 3 * 4, "only what was in flight at a kill is asked twice"
