"""Each ablation changes what it says and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rise_rl.config import Config, GrpoConfig, GuidanceConfig
from rise_rl.guidance import priorities, select_feedback
from rise_rl.plateau import PlateauRule
from rise_rl.rubric import Criterion, Rubric
from rise_rl.schedule import GuidanceSchedule
from rise_rl.step_loss import loss_spec
from tests.algorithm.test_step_loss import GUIDED, NATURAL, PROMPTS, build


def config(**guidance) -> Config:
    return Config.model_validate(
        {"name": "a", "model": "m", "steps": 3, "data": {"train": "t"}, "guidance": guidance, "grpo": {"group_size": 2}}
    )


def test_lambda_scales_the_guide_rows_alone():
    small, large = build(NATURAL, GUIDED, lam=0.01), build(NATURAL, GUIDED, lam=0.05)
    for a, b in zip(small.sequences, large.sequences, strict=True):
        assert b.token_weight == pytest.approx(a.token_weight * (5 if a.is_guide else 1))
        assert replace(a, token_weight=1.0) == replace(b, token_weight=1.0)
    none = build(NATURAL, GUIDED, lam=0.0)
    assert all(s.token_weight == 0 for s in none.sequences if s.is_guide)


@pytest.mark.parametrize("m", [1, 5, 10, "all"])
def test_m_is_how_many_of_the_missed_criteria_are_shown(m):
    rubric = Rubric([Criterion(f"c{k}", 1.0 + k % 4) for k in range(15)])
    rng = np.random.default_rng(0)
    verdicts = rng.integers(0, 2, (8, 15)).astype(float)
    verdicts[:, [3, 9, 11]] = 1.0  # met by everybody
    ranking = select_feedback(rubric, verdicts.tolist(), 15)
    assert len(ranking) == 12
    shown = select_feedback(rubric, verdicts.tolist(), m)
    assert shown == (ranking if m == "all" else ranking[:m])
    assert min(priorities(rubric, verdicts.tolist())[k] for k in shown) > 0


@pytest.mark.parametrize("kind", ["logprob", "support"])
def test_the_guide_loss_is_all_that_uniform_weights_change(kind):
    ours, other = config(), config(loss=kind)
    assert loss_spec(other) == replace(loss_spec(ours), guide=kind)
    assert build(NATURAL, GUIDED, guidance=other.guidance) == build(NATURAL, GUIDED, guidance=ours.guidance)


def test_coupled_guided_answers_are_members_of_the_group():
    coupled = build(NATURAL, GUIDED, guidance=GuidanceConfig(coupled=True))
    expected = []
    for uid, rewards in (("p", [0.0, 1.0, 0.9, 0.4, 0.6]), ("q", [0.25, 0.75, 0.5])):
        r = np.array(rewards)
        expected += [(uid, a) for a in (r - r.mean()) / (r.std(ddof=1) + 1e-6)]
    found = [(s.uid, s.advantage) for s in coupled.sequences]
    assert sorted(found) == [(uid, pytest.approx(a)) for uid, a in sorted(expected)]
    assert not any(s.is_guide for s in coupled.sequences)
    tokens = sum(s.length for s in [*NATURAL, *GUIDED])
    assert [s.token_weight for s in coupled.sequences] == pytest.approx([1 / tokens] * 8)
    assert all(s.prompt_ids == PROMPTS[s.uid] for s in coupled.sequences)  # learnt without the hint
    hinted = [s for s in coupled.sequences if s.behaviour_logprob is None]
    assert [s.coupled for s in coupled.sequences] == [s in hinted for s in coupled.sequences]
    assert sorted(s.response_ids for s in hinted) == sorted(s.rollout.token_ids for s in GUIDED)
    assert len(coupled.advantages) == len(coupled.penalties) == len(NATURAL)
    assert coupled.gains == build(NATURAL, GUIDED).gains  # reported, not used


def test_coupling_without_guided_answers_is_plain_grpo():
    assert build(NATURAL, guidance=GuidanceConfig(coupled=True)) == build(NATURAL)


def test_coupled_guided_answers_get_the_length_penalty_and_the_mask_of_natural_ones():
    grpo = GrpoConfig(group_size=2, mask_truncated=True)
    cut = [replace(s, rollout=replace(s.rollout, finish_reason="length")) for s in GUIDED[:1]]
    coupled = build(NATURAL, [*cut, *GUIDED[1:]], grpo=grpo, guidance=GuidanceConfig(coupled=True))
    assert len(coupled.sequences) == 7


def test_persistent_guidance_outlasts_every_plateau():
    flat: list[float | None] = [0.3] * 500
    rule = PlateauRule()
    assert not GuidanceSchedule(True, "plateau", rule).active(500, flat)
    assert not GuidanceSchedule(True, 500, rule).active(500, flat)
    assert GuidanceSchedule(True, "never", rule).active(500, flat)
