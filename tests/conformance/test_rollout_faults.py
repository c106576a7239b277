"""Faults that peers shipped around rollouts and weight sync: raw log-probs, ignored seeds, stale weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rise_engine.config import EngineConfig
from rise_engine.parity import ParityError, parity_probe
from rise_engine.policy import PolicyEngine
from rise_engine.rollout.base import RolloutRequest, Sampling
from rise_engine.rollout.transformers import TransformersRollout
from rise_engine.seeds import derive_seed
from rise_engine.sequences import TrainSequence
from tests.tiny import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("m") / "m", "qwen3-tied")


@pytest.fixture
def rollouts(folder) -> TransformersRollout:
    engine = TransformersRollout(PolicyEngine(folder, EngineConfig(lr=1e-2, warmup_steps=0)))
    engine.sync(0)
    return engine


def requests(prompt, count, rank=0):
    return [RolloutRequest("u", i, prompt, derive_seed("natural", 0, 1, "u", rank, i)) for i in range(count)]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_the_ratio_is_one_at_the_first_step_whatever_the_temperature(rollouts, temperature):
    """Raw log-probs beside tempered samples make it anything but 1."""
    prompt = (5, 6, 7)
    sampled = rollouts.generate(requests(prompt, 6), Sampling(12, temperature))
    sequences = [
        TrainSequence("u", prompt, r.token_ids, 0.01, (-1.0) ** i, old_logprob=r.logprobs, behaviour_logprob=r.logprobs)
        for i, r in enumerate(sampled)
    ]
    stats = rollouts.policy.train_step(sequences, temperature=temperature)
    assert stats.ratio_mean == pytest.approx(1, abs=1e-5)
    assert stats.ratio_max == pytest.approx(1, abs=1e-4)
    assert stats.clip_fraction == 0
    assert stats.logprob_gap_max < 1e-4


class RawLogprobs(TransformersRollout):
    """An engine that samples at the temperature and reports log-probs without it."""

    def generate(self, requests, sampling, progress=None):
        found = super().generate(requests, sampling, progress)
        raw = [self.policy.logprobs(r.prompt_ids, [r.token_ids], temperature=1.0)[0] for r in found]
        return [replace(r, logprobs=tuple(values.tolist())) for r, values in zip(found, raw)]


def test_the_parity_probe_fails_for_raw_log_probs(rollouts):
    raw = RawLogprobs(rollouts.policy)
    raw.sync(0)
    with pytest.raises(ParityError, match="log-probs taken before the temperature"):
        parity_probe(raw, rollouts.policy)


def test_the_parity_probe_fails_for_a_stale_tied_head(rollouts, folder):
    """The embedding was synced and the head that shares its weight was not."""
    stale = TransformersRollout(PolicyEngine(folder, EngineConfig()))
    head = stale.policy.model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach() * 1.05)
    stale.sync(0)
    with pytest.raises(ParityError, match="a tied lm_head is sent separately"):
        parity_probe(stale, rollouts.policy)


def test_the_parity_probe_fails_for_nan_and_for_an_old_weight_version(rollouts):
    class Nan(TransformersRollout):
        def generate(self, requests, sampling, progress=None):
            found = super().generate(requests, sampling, progress)
            return [replace(r, logprobs=(float("nan"),) * len(r.token_ids)) for r in found]

    broken = Nan(rollouts.policy)
    broken.sync(0)
    with pytest.raises(ParityError, match="nan nats"):
        parity_probe(broken, rollouts.policy)

    class Old(TransformersRollout):
        def generate(self, requests, sampling, progress=None):
            return [replace(r, weight_version=-1) for r in super().generate(requests, sampling, progress)]

    old = Old(rollouts.policy)
    old.sync(0)
    with pytest.raises(ParityError, match="weights of step -1"):
        parity_probe(old, rollouts.policy)


def test_generating_before_the_first_sync_is_an_error(rollouts):
    with pytest.raises(RuntimeError, match="before the first sync"):
        TransformersRollout(rollouts.policy).generate(requests((5,), 1), Sampling(2))


def test_generating_after_an_update_without_a_sync_is_an_error(rollouts):
    rollouts.policy.train_step([TrainSequence("u", (5,), (6, 7), 1.0, 1.0)], temperature=1.0)
    with pytest.raises(RuntimeError, match="synced at step 0, but the policy is at 1"):
        rollouts.generate(requests((5,), 1), Sampling(2))
    rollouts.sync(1)
    [r] = rollouts.generate(requests((5,), 1), Sampling(2))
    assert r.weight_version == 1


def test_samples_of_a_group_are_distinct_and_come_back_with_their_seeds(rollouts):
    """One seed for all, or a seed that is ignored, gives equal answers or answers that cannot be had again."""
    first = rollouts.generate(requests((5, 6), 16), Sampling(8))
    again = rollouts.generate(requests((5, 6), 16), Sampling(8))
    torch.manual_seed(999)
    torch.rand(7)
    later = rollouts.generate(requests((5, 6), 16)[::-1], Sampling(8))[::-1]
    other_rank = rollouts.generate(requests((5, 6), 16, rank=1), Sampling(8))
    assert len({r.token_ids for r in first}) == 16
    assert [r.token_ids for r in first] == [r.token_ids for r in again] == [r.token_ids for r in later]
    assert not {r.token_ids for r in first} & {r.token_ids for r in other_rank}
