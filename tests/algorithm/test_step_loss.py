"""A step's sequences and weights against the equations, written out in float64."""

import math

import numpy as np
import pytest

from rise_engine.rollout.base import Rollout
from rise_rl.config import GrpoConfig, GuidanceConfig
from rise_rl.data import Example
from rise_rl.rubric import Criterion, Rubric
from rise_rl.samples import Sample
from rise_rl.step_loss import build_step_loss

RUBRIC = Rubric([Criterion("a", 1.0)])
PROMPTS = {"p": (1, 2, 3), "q": (4, 5)}


def sample(uid, reward, length, *, shown=(), finish="stop"):
    example = Example(uid=uid, messages=[{"role": "user", "content": uid}], rubric=RUBRIC, domain="t", meta={})
    guided_prompt = (9, 9, 9, 9)
    rollout = Rollout(
        uid=uid,
        index=0,
        prompt_ids=guided_prompt if shown else PROMPTS[uid],
        token_ids=tuple(range(10, 10 + length)),
        logprobs=(-1.0,) * length,
        text="",
        finish_reason=finish,
        weight_version=0,
    )
    return Sample(example, rollout, [reward], reward, shown, "guided" if shown else "natural")


def build(natural, guided=(), *, lam=0.05, grpo=None, guidance=None, max_length=100):
    return build_step_loss(
        natural,
        list(guided),
        PROMPTS,
        guide_coefficient=lam,
        max_length=max_length,
        grpo=grpo or GrpoConfig(group_size=2),
        guidance=guidance or GuidanceConfig(),
    )


NATURAL = [sample("p", 0.0, 4), sample("p", 1.0, 6), sample("q", 0.25, 5), sample("q", 0.75, 10)]
GUIDED = [
    sample("p", 0.9, 8, shown=(0,)),
    sample("p", 0.4, 3, shown=(0,)),
    sample("p", 0.6, 2, shown=(0,)),
    sample("q", 0.5, 7, shown=(0,)),
]


def test_natural_rows_carry_group_advantages_and_the_token_mean_weight():
    loss = build(NATURAL)
    expected = [s * math.sqrt(0.5) for s in (-1, 1, -1, 1)]
    assert [s.advantage for s in loss.sequences] == pytest.approx(expected, rel=1e-5)
    assert [s.token_weight for s in loss.sequences] == [1 / 25] * 4
    assert [s.behaviour_logprob for s in loss.sequences] == [s.rollout.logprobs for s in NATURAL]


def test_guided_rows_are_filtered_weighted_by_equation_11_and_learnt_under_the_original_prompt():
    loss = build(NATURAL, GUIDED)
    rows = [s for s in loss.sequences if s.is_guide]
    # natural mean 0.5 for both prompts: 0.9 and 0.6 are kept, 0.4 and 0.5 (not above the mean) are not
    assert loss.gains == pytest.approx([0.4, 0.0, 0.1, 0.0])
    assert [r.token_weight for r in rows] == pytest.approx([0.05 * 0.4 / (2 * 2 * 8), 0.05 * 0.1 / (2 * 2 * 2)])
    assert [r.prompt_ids for r in rows] == [PROMPTS["p"]] * 2
    assert [r.response_ids for r in rows] == [GUIDED[0].rollout.token_ids, GUIDED[2].rollout.token_ids]


def test_guided_answers_change_nothing_about_the_natural_rows():
    alone = build(NATURAL).sequences
    together = [s for s in build(NATURAL, GUIDED).sequences if not s.is_guide]
    assert together == alone


def test_whole_step_equals_equation_12():
    rng = np.random.default_rng(0)
    loss = build(NATURAL, GUIDED, lam=0.3)
    logp = {s.response_ids: -rng.exponential(2.0, len(s.response_ids)) for s in loss.sequences}

    weighted = sum(
        s.token_weight
        * (np.log((np.exp(lp) + 0.1) / np.exp(lp)) if s.is_guide else np.full(len(lp), -s.advantage)).sum()
        for s in loss.sequences
        for lp in [logp[s.response_ids]]
    )

    advantages = []
    for group in ([0.0, 1.0], [0.25, 0.75]):
        r = np.array(group)
        advantages += list((r - r.mean()) / (r.std(ddof=1) + 1e-6))
    grpo = -sum(a * s.length for a, s in zip(advantages, NATURAL)) / 25
    guide_p = sum(
        gain / s.length * -np.log(np.exp(lp) / (np.exp(lp) + 0.1)).sum()
        for gain, s in [(0.4, GUIDED[0]), (0.1, GUIDED[2])]
        for lp in [logp[s.rollout.token_ids]]
    )
    assert weighted == pytest.approx(grpo + 0.3 * (guide_p / 2 + 0.0) / 2, rel=1e-6)


def test_ungraded_samples_leave_every_denominator():
    natural = [*NATURAL, sample("p", None, 50)]
    loss = build(natural)
    assert loss.advantages[-1] is None
    assert [s.token_weight for s in loss.sequences] == [1 / 25] * 4


def test_a_flat_group_counts_in_the_denominator():
    natural = [sample("p", 1.0, 4), sample("p", 1.0, 6), *NATURAL[2:]]
    loss = build(natural)
    assert [s.advantage for s in loss.sequences[:2]] == [0.0, 0.0]
    assert loss.sequences[-1].token_weight == 1 / 25


def test_penalty_shapes_the_advantage_but_not_the_filter():
    grpo = GrpoConfig(group_size=2, overlong_buffer=10, overlong_factor=0.5)
    natural = [sample("p", 0.5, 12), sample("p", 0.5, 20)]
    loss = build(natural, [sample("p", 0.55, 20, shown=(0,))], grpo=grpo, max_length=20)
    assert loss.penalties == pytest.approx([-0.1, -0.5])
    assert loss.advantages[0] > 0 > loss.advantages[1]
    assert loss.gains == pytest.approx([0.05])  # against the unshaped mean 0.5, at the maximum length


def test_dropping_truncated_guided_answers_is_an_option():
    guided = [sample("p", 0.9, 8, shown=(0,), finish="length")]
    assert build(NATURAL, guided).gains == pytest.approx([0.4])
    assert build(NATURAL, guided, guidance=GuidanceConfig(drop_truncated=True)).gains == [0.0]


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_masked_truncated_samples_leave_numerator_and_denominator_alike(aggregation):
    cut = sample("p", 1.0, 50, finish="length")
    natural = [*NATURAL[:2], cut, *NATURAL[2:]]
    grpo = GrpoConfig(group_size=2, aggregation=aggregation, mask_truncated=True)
    masked = build(natural, grpo=grpo)
    assert cut.rollout.token_ids not in [s.response_ids for s in masked.sequences]
    assert [s.token_weight for s in masked.sequences] == [s.token_weight for s in build(NATURAL, grpo=grpo).sequences]
    kept = build(natural, grpo=GrpoConfig(group_size=2, aggregation=aggregation))
    assert kept.sequences[0].token_weight < masked.sequences[0].token_weight


def test_the_filter_compares_with_the_natural_mean_of_the_same_prompt():
    natural = [sample("p", 0.0, 4), sample("p", 0.2, 6), sample("q", 0.8, 5), sample("q", 1.0, 10)]
    guided = [sample("p", 0.5, 8, shown=(0,)), sample("q", 0.5, 8, shown=(0,))]
    assert build(natural, guided).gains == pytest.approx([0.4, 0.0])


def test_mini_batches_have_their_own_normalisers_and_the_same_advantages_and_gains():
    whole = build(NATURAL, GUIDED)
    split = build(NATURAL, GUIDED, grpo=GrpoConfig(prompts_per_step=2, group_size=2, mini_batch_prompts=1))
    assert (split.advantages, split.gains) == (whole.advantages, whole.gains)
    first, second = split.mini_batches
    assert [s.uid for s in first] == ["p"] * 4
    assert [s.uid for s in second] == ["q"] * 2
    assert [s.token_weight for s in first[:2]] == [1 / 10] * 2
    assert [s.token_weight for s in second] == [1 / 15] * 2
    assert [s.token_weight for s in first[2:]] == pytest.approx([0.05 * 0.4 / (2 * 8), 0.05 * 0.1 / (2 * 2)])
