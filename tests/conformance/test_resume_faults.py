"""Faults that peers shipped around resume: a second resume, state left behind, an engine that is not re-synced."""

from __future__ import annotations

import pytest

from rise_engine.checkpoint import CheckpointStore
from rise_engine.config import EngineConfig
from rise_engine.policy import PolicyEngine
from rise_engine.rollout.base import RolloutRequest, Sampling
from rise_engine.rollout.transformers import TransformersRollout
from rise_engine.seeds import derive_seed
from rise_engine.sequences import TrainSequence
from tests.tiny import make_tiny

SAMPLING = Sampling(10, 0.8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("m") / "m", "qwen3-tied")


def start(folder, store: CheckpointStore | None = None) -> TransformersRollout:
    policy = PolicyEngine(folder, EngineConfig(lr=1e-2, warmup_steps=3))
    if store is not None:
        assert store.load_latest(policy)
    rollouts = TransformersRollout(policy)
    rollouts.sync(policy.step)
    return rollouts


def a_training_step(rollouts: TransformersRollout) -> tuple:
    """Sample, reward by length of the text, learn: the next step depends on every earlier one."""
    policy = rollouts.policy
    requests = [RolloutRequest("u", i, (5, 6, 7), derive_seed("natural", 3, policy.step + 1, "u", i)) for i in range(6)]
    answers = rollouts.generate(requests, SAMPLING)
    mean = sum(len(r.text) for r in answers) / len(answers)
    stats = policy.train_step(
        [TrainSequence("u", r.prompt_ids, r.token_ids, 0.02, len(r.text) - mean) for r in answers],
        temperature=SAMPLING.temperature,
    )
    rollouts.sync(policy.step)
    return tuple(r.token_ids for r in answers), stats.loss, stats.grad_norm, stats.lr, stats.entropy


def test_resuming_twice_gives_the_tokens_and_numbers_of_the_uninterrupted_run(folder, tmp_path):
    uninterrupted = start(folder)
    expected = [a_training_step(uninterrupted) for _ in range(7)]
    store = CheckpointStore(tmp_path)
    run = start(folder)
    found = [a_training_step(run) for _ in range(2)]
    store.save(run.policy)
    a_training_step(run)  # done, but lost: the process dies before the next checkpoint
    run = start(folder, store)
    found += [a_training_step(run) for _ in range(2)]
    store.save(run.policy)
    run = start(folder, store)
    found += [a_training_step(run) for _ in range(3)]
    assert found == expected
    assert len({tokens for tokens, *_ in expected}) == 7


def test_an_engine_that_is_not_synced_after_loading_refuses_to_generate(folder, tmp_path):
    run = start(folder)
    a_training_step(run)
    CheckpointStore(tmp_path).save(run.policy)
    resumed = start(folder)
    CheckpointStore(tmp_path).load_latest(resumed.policy)
    with pytest.raises(RuntimeError, match="synced at step 0, but the policy is at 1"):
        resumed.generate([RolloutRequest("u", 0, (5,), 1)], SAMPLING)
