import json
import math

import pytest

from rise_engine.rollout.base import Rollout
from rise_engine.sequences import StepStats, TrainSequence
from rise_rl.data import Example
from rise_rl.rubric import Criterion, Rubric
from rise_rl.samples import Sample
from rise_rl.step_loss import StepLoss
from rise_rl.step_metrics import criterion_failures, reward_gap, sample_metrics, training_metrics

RUBRIC = Rubric([Criterion("good", 2.0), Criterion("bad", -1.0)])


def sample(uid, verdicts, shown=()):
    example = Example(uid, ({"role": "user", "content": uid},), RUBRIC, "topic", {})
    rollout = Rollout(uid, 0, (1,), (2, 3), (-1.0, -1.0), "", "stop", 0)
    return Sample(example, rollout, verdicts, RUBRIC.reward(verdicts), shown)


NATURAL = [sample("p", [0, 0]), sample("p", [1, 0]), sample("q", [1, 1]), sample("q", [0, 0]), sample("r", [1, 1])]


def test_the_gap_is_over_prompts_with_graded_answers_of_both_kinds():
    guided = [sample("p", [1, 0], (0,)), sample("q", [None, 0], (0,))]
    raw, over_all = reward_gap(NATURAL, guided)
    assert raw == pytest.approx(1.0 - 0.5)  # q's guided answer is ungraded: q is left out on both sides
    assert over_all == pytest.approx(1.0 - (0.5 + 0.25 + 0.5) / 3)
    ungraded = [sample("s", [None, 0]), *NATURAL]
    assert reward_gap(ungraded, [*guided, sample("s", [1, 0], (0,))])[0] == pytest.approx(0.5)
    assert reward_gap(NATURAL, []) == (None, None)


def graded(uid, rewards):
    """Answers to one prompt with these rewards; None: ungraded."""
    return [sample(uid, [r, 0]) for r in rewards]


def test_ungraded_answers_do_not_turn_the_mix_of_prompts_into_a_gap():
    """Guided and natural answers are alike on each prompt; more of the easy prompt's guided ones are graded."""
    natural = [*graded("easy", [0.9] * 8), *graded("hard", [0.1] * 8)]
    guided = [*graded("easy", [0.9] * 8), *graded("hard", [0.1, *[None] * 7])]
    assert reward_gap(natural, guided) == pytest.approx((0.0, 0.0), abs=1e-12)
    better = [*graded("easy", [0.95, *[None] * 7]), *graded("hard", [0.15] * 8)]
    assert reward_gap(natural, better) == pytest.approx((0.05, 0.05))
    uneven = [*graded("easy", [0.9] * 8), *graded("hard", [0.1, *[None] * 7])]
    assert reward_gap(uneven, better) == pytest.approx((0.05, 0.05))


def learnt(uid, advantage, **changes):
    return TrainSequence(uid, (1,), (2, 3), 0.5, advantage, **changes)


def test_groups_without_a_graded_answer_are_no_flat_groups():
    natural = [*NATURAL[:4], sample("r", [None, 0]), sample("r", [0, None])]
    sequences = [
        learnt("p", -1.0),
        learnt("p", 1.0),
        learnt("q", 0.0),
        learnt("q", 0.0),
        learnt("q", 0.0, is_guide=True),
    ]
    loss = StepLoss([sequences], [-1.0, 1.0, 0.0, 0.0, None, None], [0.0] * 6, [])
    metrics = sample_metrics(natural, [], loss)
    assert metrics["groups/zero_advantage"] == 1
    assert metrics["ungraded_samples"] == metrics["unknown_verdicts"] == 2


def test_a_group_whose_answers_are_all_masked_has_no_policy_gradient():
    loss = StepLoss([[learnt("q", 1.0), learnt("r", 0.0)]], [-1.0, 1.0, 1.0, -1.0, 0.0], [0.0] * 5, [])
    assert sample_metrics(NATURAL, [], loss)["groups/zero_advantage"] == 2


def test_failures_count_misses_graded_shares_and_met_negatives():
    samples = [sample("p", [0, 1]), sample("p", [0.25, 0]), sample("p", [None, 0])]
    good, bad = criterion_failures(samples)
    assert (good["failures"], good["samples"]) == (1.75, 2)
    assert (bad["failures"], bad["samples"]) == (1, 3)
    assert good["topic"] == "topic"


def stats(**changes):
    names = list(StepStats.__dataclass_fields__)
    return StepStats(**{**dict.fromkeys(names, 0.5), "skipped": False, **changes})


def test_a_skipped_step_has_no_loss_and_missing_values_are_null():
    assert training_metrics(stats(forwarded_sequences=3), 5)["sequences/skipped"] == 2
    metrics = training_metrics(stats(skipped=True, loss=0.0, grad_norm=0.0, entropy=math.nan), 5)
    assert json.dumps(metrics["skipped"]) == "1"  # as docs/metrics.md says, not true
    assert [metrics[name] for name in ("loss", "loss/policy", "loss/guide", "grad_norm", "entropy")] == [None] * 5
