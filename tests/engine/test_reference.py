"""The frozen reference and the KL term, against float64 written out here."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rise_engine.config import EngineConfig, LoraSettings
from rise_engine.policy import PolicyEngine
from rise_engine.reference import AdapterReference, FrozenReference, reference_of
from rise_kernels.token_losses import LossSpec
from rise_rl.update import update
from tests.engine.helpers import GAMMA, a_step, plain_logprobs, plain_model
from tests.tiny import make_tiny

T = 0.7
QUICK = {"lr": 0.1, "eps": 1e-2, "warmup_steps": 0, "micro_batch_tokens": 45}


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("other") / "model", "qwen3-tied", seed=5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_term_and_its_gradient(tiny_folder, other_folder, estimator):
    """Also of natural rows without an advantage; guide rows have no KL."""
    sequences = [replace(s, advantage=0.0) if i % 3 == 0 else s for i, s in enumerate(a_step(prompts=2))]
    policy = PolicyEngine(
        tiny_folder("qwen3-tied"), EngineConfig(**QUICK), loss=LossSpec(kl_coef=0.3, kl_estimator=estimator)
    )
    stats = update(policy, [sequences], temperature=T, reference=FrozenReference(other_folder, policy))

    model = plain_model(tiny_folder("qwen3-tied"), torch.float64)
    frozen = plain_model(other_folder, torch.float64)
    loss, kls = torch.zeros((), dtype=torch.float64), []
    for s in sequences:
        logp = plain_logprobs(model, s.prompt_ids, s.response_ids, T)
        if s.is_guide:
            token = -torch.log(logp.exp() / (logp.exp() + GAMMA))
        else:
            d = logp - plain_logprobs(frozen, s.prompt_ids, s.response_ids, T).detach()
            kl = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[estimator]
            kls.append(kl.detach())
            token = -s.advantage * (logp - logp.detach()).exp() + 0.3 * kl
        loss = loss + s.token_weight * token.sum()
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert stats.kl == pytest.approx(torch.cat(kls).mean().item(), rel=1e-3)
    assert stats.loss == pytest.approx(loss.item(), rel=1e-3)
    assert stats.grad_norm == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("stage, dtype", [(0, "float32"), (3, "float32"), (2, "bfloat16"), (3, "bfloat16")])
def test_before_the_first_update_the_kl_is_exactly_zero(tiny_folder, stage, dtype):
    folder = tiny_folder("qwen3-tied")
    natural = [s for s in a_step() if not s.is_guide]
    policy = PolicyEngine(folder, EngineConfig(zero_stage=stage, dtype=dtype, **QUICK), loss=LossSpec(kl_coef=0.3))
    reference = reference_of(folder, policy)
    assert next(reference.module.parameters()).dtype == policy.config.torch_dtype
    first, second = (update(policy, [natural], temperature=T, reference=reference) for _ in range(2))
    assert first.kl == 0.0
    assert second.kl > 1e-6


def test_the_reference_stays_where_it_was_while_the_policy_trains(tiny_folder):
    folder = tiny_folder("llama")
    policy = PolicyEngine(folder, EngineConfig(**QUICK))
    reference = FrozenReference(folder, policy)
    before = reference.score(a_step(), temperature=T)
    policy.train_step(a_step(), temperature=T)
    for old, new in zip(before, reference.score(a_step(), temperature=T)):
        assert torch.equal(old, new)
    assert not torch.equal(before[0], policy.score(a_step(), temperature=T)[0])


def test_a_lora_run_needs_no_second_model(tiny_folder):
    folder = tiny_folder("qwen3")
    policy = PolicyEngine(folder, EngineConfig(lora=LoraSettings(rank=4), **QUICK), loss=LossSpec(kl_coef=0.1))
    reference = reference_of(folder, policy)
    assert isinstance(reference, AdapterReference)
    natural = [s for s in a_step() if not s.is_guide]
    before = reference.score(natural, temperature=T)
    stats = [update(policy, [natural], temperature=T, reference=reference) for _ in range(2)]
    assert stats[0].kl == 0.0
    assert stats[1].kl > 1e-9
    for old, new in zip(before, reference.score(natural, temperature=T)):
        assert torch.equal(old, new)


@pytest.mark.parametrize("spec", [LossSpec(kl_coef=0.1), LossSpec(is_cap=2.0)])
def test_a_micro_batch_of_guide_rows_alone_needs_neither_reference_nor_behaviour(tiny_folder, spec):
    sequences = [
        s
        if s.is_guide
        else replace(s, ref_logprob=(-5.0,) * len(s.response_ids), behaviour_logprob=(-5.0,) * len(s.response_ids))
        for s in a_step()
    ]
    policy = PolicyEngine(tiny_folder("qwen3"), EngineConfig(**{**QUICK, "micro_batch_tokens": 1}), loss=spec)
    apart = policy.train_step(sequences, temperature=T)
    assert apart.micro_batches == len(sequences)
    policy = PolicyEngine(tiny_folder("qwen3"), EngineConfig(**{**QUICK, "micro_batch_tokens": 1000}), loss=spec)
    assert policy.train_step(sequences, temperature=T).loss == pytest.approx(apart.loss, rel=1e-5)
