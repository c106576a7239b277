import pytest

from rise_rl.rubric import Criterion, Rubric, as_verdict

RUBRIC = Rubric([Criterion("a", 5), Criterion("b", 3), Criterion("c", -4)])


@pytest.mark.parametrize(
    "verdicts, score, reward",
    [
        ([1, 1, 0], 1.0, 1.0),
        ([1, 0, 0], 5 / 8, 5 / 8),
        ([1, 1, 1], 0.5, 0.5),
        ([0, 1, 1], -1 / 8, 0.0),
        (["met", "not_met", "met"], 1 / 8, 1 / 8),
        ([0.5, 1.0, 0.25], (2.5 + 3 - 1) / 8, 4.5 / 8),
    ],
)
def test_reward_by_hand(verdicts, score, reward):
    assert RUBRIC.score(verdicts) == pytest.approx(score)
    assert RUBRIC.reward(verdicts) == pytest.approx(reward)


@pytest.mark.parametrize("unknown", [None, "unknown"])
def test_one_unknown_verdict_leaves_the_sample_ungraded(unknown):
    assert RUBRIC.reward([1, unknown, 0]) is None
    assert RUBRIC.score([1, unknown, 0]) is None


@pytest.mark.parametrize("bad", ["yes", 1.5, -0.1, float("nan")])
def test_anything_else_is_no_verdict(bad):
    with pytest.raises(ValueError, match="verdict: expected"):
        as_verdict(bad)


def test_rubrics_that_cannot_reward_are_refused():
    with pytest.raises(ValueError, match="positive weight"):
        Rubric([Criterion("a", -1)])
    with pytest.raises(ValueError, match="positive weight"):
        Rubric([])
    with pytest.raises(ValueError, match="expected a non-empty string"):
        Criterion("  ", 1)
    with pytest.raises(ValueError, match="expected a finite number"):
        Criterion("a", float("nan"))
    with pytest.raises(ValueError, match="expected one for each of 3"):
        RUBRIC.reward([1, 0])
