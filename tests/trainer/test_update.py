"""Mini-batches: several optimizer updates on one rollout batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rise_engine.config import EngineConfig
from rise_engine.optimizer import NonFiniteError
from rise_engine.policy import PolicyEngine
from rise_engine.sequences import StepStats, merge
from rise_rl.config import ConfigError, load_config
from rise_rl.launch import run_training
from rise_rl.run_folder import RunFolder
from rise_rl.update import update
from tests.engine.helpers import a_step, plain_logprobs, plain_model, plain_steps
from tests.trainer.test_trainer import records, run

T = 0.7
QUICK = {"lr": 0.1, "eps": 1e-2, "warmup_steps": 0, "clip_norm": 1.0, "micro_batch_tokens": 45}


def mini_batches(count: int):
    return [a_step(seed, prompts=2) for seed in range(count)]


def test_updates_equal_plain_pytorch_with_log_probs_from_before_the_first(tiny_folder):
    batches = mini_batches(3)
    plain = plain_model(tiny_folder)
    with_old = [
        [
            s if s.is_guide else replace(s, old_logprob=plain_logprobs(plain, s.prompt_ids, s.response_ids, T).tolist())
            for s in batch
        ]
        for batch in batches
    ]
    expected = plain_steps(plain, with_old, t=T, lr=QUICK["lr"], eps=QUICK["eps"], clip=QUICK["clip_norm"])
    policy = PolicyEngine(tiny_folder, EngineConfig(**QUICK))
    stats = update(policy, batches, temperature=T)
    assert policy.step == 3
    assert stats.loss == pytest.approx(sum(loss for loss, _ in expected) / 3, rel=1e-4)
    assert stats.grad_norm == pytest.approx(sum(norm for _, norm in expected) / 3, rel=1e-4)
    assert stats.ratio_max > 1.1  # later mini-batches are off policy
    assert stats.clip_fraction > 0
    prompt, response = batches[0][0].prompt_ids, batches[0][0].response_ids
    [after] = policy.logprobs(prompt, [response], temperature=T)
    assert after.tolist() == pytest.approx(plain_logprobs(plain, prompt, response, T).tolist(), rel=1e-3, abs=1e-4)


def test_the_first_update_is_exactly_on_policy_and_one_update_scores_nothing(tiny_folder, monkeypatch):
    policy = PolicyEngine(tiny_folder, EngineConfig(**QUICK))
    scored = []
    monkeypatch.setattr(policy, "score", lambda sequences, **_: scored.append(len(sequences)) or [])
    stats = update(policy, mini_batches(1), temperature=T)
    assert scored == []
    assert stats.ratio_mean == stats.ratio_max == 1.0


def test_a_step_of_several_updates_trains_resumes_and_counts_steps(tiny_config):
    config = tiny_config(steps=2, grpo__prompts_per_step=2, grpo__mini_batch_prompts=1, evaluation__every=1)
    metrics, folder = run(config)
    assert [m["step"] for m in metrics] == [1, 2]
    assert [r["weight_version"] for r in records(folder, 2)] == [2] * len(records(folder, 2))
    assert sorted(p.name for p in (folder / "checkpoints").glob("step-*")) == ["step-00000004"]
    assert any(m["ratio/max"] != 1.0 for m in metrics)
    again = load_config(config, ["steps=3"])
    run_training(again, resume=True)
    assert [row["step"] for row in RunFolder(folder).metrics()] == [1, 2, 3]
    assert [row["step"] for row in RunFolder(folder).evals()] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="mini_batch_prompts: the checkpoint has 6 optimizer updates"):
        run_training(load_config(config, ["steps=5", "grpo.prompts_per_step=4"]), resume=True)
    # 6 are whole steps of 3 too, but not of the steps that were made: metrics of step 3 would be dropped.
    with pytest.raises(ConfigError, match="6 optimizer updates, 2 a step, but this configuration makes 3 a step"):
        run_training(load_config(config, ["steps=5", "grpo.prompts_per_step=3"]), resume=True)
    assert [row["step"] for row in RunFolder(folder).metrics()] == [1, 2, 3]


def test_a_failure_in_the_middle_of_a_step_saves_no_half_of_it(tiny_config, monkeypatch):
    config = tiny_config(steps=3, grpo__mini_batch_prompts=1, evaluation__every=0, checkpoint__every=1)
    train_step = PolicyEngine.train_step

    def failing(self, sequences, **keywords):
        if self.step == 3:  # the second update of step 2
            raise NonFiniteError("the loss is not finite")
        return train_step(self, sequences, **keywords)

    monkeypatch.setattr(PolicyEngine, "train_step", failing)
    with pytest.raises(NonFiniteError):
        run(config)
    monkeypatch.undo()
    folder = run_training(load_config(config), resume=True)
    assert [m["step"] for m in RunFolder(folder).metrics()] == [1, 2, 3]
    whole, _ = run(config, "name=whole")
    assert [m["loss"] for m in RunFolder(folder).metrics()] == [m["loss"] for m in whole]


def test_mini_batches_must_divide_the_step(tiny_config):
    with pytest.raises(ConfigError, match=r"mini_batch_prompts: expected a divisor of prompts_per_step \(2\), found 3"):
        load_config(tiny_config(grpo__mini_batch_prompts=3))


def stats(**changes) -> StepStats:
    values = dict.fromkeys(StepStats.__dataclass_fields__, 0.0)
    return StepStats(**{**values, "skipped": False, **changes})


def test_merged_statistics_mean_what_they_say():
    a = stats(
        loss=1.0,
        grad_norm=2.0,
        tokens=12,
        natural_tokens=6,
        guide_tokens=4,
        gap_tokens=6,
        entropy=1.0,
        mean_support=0.2,
    )
    b = stats(
        loss=3.0, grad_norm=4.0, tokens=4, natural_tokens=2, guide_tokens=2, gap_tokens=2, entropy=3.0, mean_support=0.5
    )
    a, b = replace(a, ratio_max=1.0, logprob_gap_max=0.5), replace(b, ratio_max=1.7, logprob_gap_max=math.nan)
    nothing = stats(skipped=True, entropy=math.nan, mean_support=math.nan, ratio_max=math.nan, lr=0.5)
    merged = merge([a, b, nothing])
    assert (merged.loss, merged.grad_norm, merged.lr, merged.skipped) == (2.0, 3.0, 0.5, False)
    assert merged.tokens == 16
    assert (merged.natural_tokens, merged.guide_tokens) == (8, 6)
    assert merged.entropy == pytest.approx((6 * 1.0 + 2 * 3.0) / 8)
    assert merged.mean_support == pytest.approx((4 * 0.2 + 2 * 0.5) / 6)
    assert (merged.ratio_max, merged.logprob_gap_max) == (1.7, 0.5)
    assert merge([nothing, nothing]).skipped
    assert math.isnan(merge([nothing, nothing]).entropy)


def test_a_resumed_run_measures_its_kl_to_the_initial_model(tiny_config):
    config = tiny_config(steps=3, evaluation__every=0, grpo__kl_coef=0.1)
    whole, _ = run(config, "name=whole")
    run(config, "name=halted", "steps=2")
    folder = run_training(load_config(config, ["name=halted"]), resume=True)
    resumed = RunFolder(folder).metrics()
    assert [m["kl"] for m in resumed] == [m["kl"] for m in whole]
    assert 0 <= whole[0]["kl"] < 1e-12  # batched with guided rows, log-probs differ in their last bits
    assert whole[2]["kl"] > 1e-6
