"""HealthBench's scores on its own rows, worked out by hand; the unclipped score stands beside the training reward."""

from pathlib import Path

import pytest

from rise_rl.data import load_examples
from rise_rl.graders.base import GradeItem
from rise_rl.graders.llm import JudgeConfig, LlmGrader
from rise_rl.rubric import Criterion, Rubric
from tests.graders.fake_server import FakeJudge, Reply, criteria_of

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_rows = pytest.mark.skipif(not SHARED.is_dir(), reason="the public rows are not beside the repository")


def rubric(*points):
    return Rubric(tuple(Criterion(f"criterion {i}", p) for i, p in enumerate(points)))


@pytest.mark.parametrize(
    "points, met, score, reward",
    [
        ((8, 7, -4, 6), (1, 0, 1, 1), 10 / 21, 10 / 21),  # 8 - 4 + 6 of 8 + 7 + 6
        ((8, 7, -4, 6), (1, 1, 0, 1), 1.0, 1.0),
        ((8, 7, -4, 6), (0, 0, 1, 0), -4 / 21, 0.0),
        ((10, 10, 6, 6, 6, -8), (1, 0, 1, 0, 0, 1), 8 / 38, 8 / 38),
        ((7, 6, 6, 6, 5, -7, -8), (1, 1, 1, 1, 1, 1, 1), 0.5, 0.5),  # 30 - 15 of 30
        ((5, 5), (0, 0), 0.0, 0.0),
        ((5, -10), (1, 1), -1.0, 0.0),
        ((5, -10), (1, None), None, None),
        ((9, 1), (4 / 9, 1), 0.5, 0.5),  # a graded verdict: 4 + 1 of 10
    ],
)
def test_scores_by_hand(points, met, score, reward):
    assert rubric(*points).score(met) == (None if score is None else pytest.approx(score, abs=1e-12))
    assert rubric(*points).reward(met) == (None if reward is None else pytest.approx(reward, abs=1e-12))


@needs_rows
@pytest.mark.parametrize("name", ["healthbench_list_tags.jsonl", "healthbench_dict_tags.jsonl"])
def test_public_rows_from_the_judge_to_the_score(name):
    """Positive criteria met: 1. All criteria met: the negative points come off. Nothing but the negative: below 0."""
    examples = load_examples(SHARED / name)
    assert any(c.weight < 0 for e in examples for c in e.rubric.criteria)
    weights = {c.text: c.weight for e in examples for c in e.rubric.criteria}
    policies = {
        "only good": lambda weight: weight > 0,
        "all": lambda weight: True,
        "only bad": lambda weight: weight < 0,
    }
    for policy, meets in policies.items():

        def judge(request, meets=meets):
            [(_, text)] = criteria_of(request)
            [weight] = {w for t, w in weights.items() if t.split("\n")[0] == text}
            return Reply('{"explanation": "e", "criteria_met": %s}' % str(meets(weight)).lower())  # noqa: UP031

        items = [GradeItem(e.uid, e.messages, "An answer.", e.rubric.criteria) for e in examples]
        with FakeJudge(judge) as server, LlmGrader(JudgeConfig(base_urls=(server.url,))) as grader:
            verdicts = grader.grade(items)
        for example, row in zip(examples, verdicts):
            positive = sum(c.weight for c in example.rubric.criteria if c.weight > 0)
            negative = sum(c.weight for c in example.rubric.criteria if c.weight < 0)
            expected = {"only good": 1.0, "all": 1.0 + negative / positive, "only bad": negative / positive}[policy]
            assert example.rubric.score(row) == pytest.approx(expected, abs=1e-12)
            assert example.rubric.reward(row) == pytest.approx(min(max(expected, 0.0), 1.0), abs=1e-12)
