"""train_step against a plain PyTorch loop with full logits, and what it refuses to do."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rise_engine.config import EngineConfig
from rise_engine.head import install_head
from rise_engine.optimizer import NonFiniteError
from rise_engine.policy import PolicyEngine
from rise_engine.sequences import TrainSequence
from rise_kernels.token_losses import LossSpec
from tests.engine.helpers import GAMMA, a_step, plain_distribution, plain_model, plain_steps
from tests.tiny import KINDS, tiny_model

T = 0.7
# A large epsilon keeps Adam's first steps proportional to the gradient, so that weights compare gradients, not signs.
QUICK = {"lr": 0.1, "eps": 1e-2, "warmup_steps": 0, "clip_norm": 1.0, "micro_batch_tokens": 45}


def engine(folder, **keys) -> PolicyEngine:
    return PolicyEngine(folder, EngineConfig(**{**QUICK, **keys}))


def weights(policy: PolicyEngine) -> dict[str, torch.Tensor]:
    import deepspeed

    parameters = list(policy.model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=policy.engine.zero_optimization_stage() == 3):
        return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_three_steps_equal_plain_pytorch(tiny_folder, kind, stage):
    steps = [a_step(seed) for seed in range(3)]
    plain = plain_model(tiny_folder(kind))
    expected = plain_steps(plain, steps, t=T, lr=QUICK["lr"], eps=QUICK["eps"], clip=QUICK["clip_norm"])
    policy = engine(tiny_folder(kind), zero_stage=stage)
    before = weights(policy)
    for sequences, (loss, norm) in zip(steps, expected):
        stats = policy.train_step(sequences, temperature=T)
        assert stats.micro_batches > 1
        assert stats.loss == pytest.approx(loss, rel=1e-4, abs=1e-5)
        assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
    after = weights(policy)
    for name, parameter in plain.named_parameters():
        moved = (parameter - before[name]).abs().max()
        assert moved > 1e-2, name
        assert (after[name] - parameter).abs().max() < 1e-3 * moved, name
    if kind.endswith("-tied"):
        assert policy.model.get_output_embeddings().weight is policy.model.get_input_embeddings().weight


def test_clipping_is_active_in_that_comparison(tiny_folder):
    assert engine(tiny_folder("qwen3")).train_step(a_step(), temperature=T).grad_norm > 1.5 * QUICK["clip_norm"]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_budget_and_checkpointing_change_nothing_but_rounding(tiny_folder, checkpointing):
    results = []
    for budget in (1, 60, 10_000):
        policy = engine(tiny_folder("qwen3-tied"), micro_batch_tokens=budget, activation_checkpointing=checkpointing)
        results.append((policy.train_step(a_step(), temperature=T), weights(policy)))
    assert next(stats.micro_batches for stats, _ in results) == 15
    assert results[-1][0].micro_batches == 1
    for stats, values in results[1:]:
        assert stats.loss == pytest.approx(results[0][0].loss, rel=1e-5)
        assert stats.grad_norm == pytest.approx(results[0][0].grad_norm, rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(value, results[0][1][name], atol=1e-5, rtol=1e-4)


def test_statistics_against_float64(tiny_folder):
    natural = [s for s in a_step(prompts=2) if not s.is_guide]
    guides = [s for s in a_step(prompts=2) if s.is_guide]
    plain = plain_model(tiny_folder("llama"), torch.float64).eval()
    g = torch.Generator().manual_seed(1)
    sequences, gaps, ratios, entropies, rhos = [], [], [], [], []
    with torch.no_grad():
        for s in [*natural, *guides]:
            logp = plain_distribution(plain, s.prompt_ids, s.response_ids, T)
            own = logp.gather(-1, torch.tensor(s.response_ids)[:, None])[:, 0]
            old = own + 0.3 * torch.randn(own.shape, generator=g, dtype=torch.float64)
            behaviour = own + 0.1 * torch.randn(own.shape, generator=g, dtype=torch.float64)
            gaps.append(((own if s.is_guide else old) - behaviour).abs())
            if s.is_guide:
                rhos.append(own.exp() / (own.exp() + GAMMA))
            else:
                ratios.append((own - old).exp())
                entropies.append(-(logp.exp() * logp).sum(-1))
            sequences.append(
                replace(s, old_logprob=None if s.is_guide else old.tolist(), behaviour_logprob=behaviour.tolist())
            )
    stats = engine(tiny_folder("llama")).train_step(sequences, temperature=T)
    gap, ratio, entropy, rho = map(torch.cat, (gaps, ratios, entropies, rhos))
    advantage = torch.cat([torch.full((len(s.response_ids),), s.advantage) for s in natural]).double()
    clipped = ((ratio > 1.28) & (advantage > 0)) | ((ratio < 0.8) & (advantage < 0))
    assert stats.tokens == len(gap)
    assert stats.forwarded_sequences == len(sequences)
    assert stats.entropy == pytest.approx(entropy.mean().item(), rel=1e-4)
    assert stats.mean_support == pytest.approx(rho.mean().item(), rel=1e-4)
    assert stats.ratio_mean == pytest.approx(ratio.mean().item(), rel=1e-4)
    assert stats.ratio_max == pytest.approx(ratio.max().item(), rel=1e-4)
    assert stats.clip_fraction == pytest.approx(clipped.double().mean().item())
    assert stats.logprob_gap_mean == pytest.approx(gap.mean().item(), rel=1e-3)
    assert stats.logprob_gap_max == pytest.approx(gap.max().item(), rel=1e-3)
    assert stats.logprob_gap_p99 == pytest.approx(gap.sort().values[math.ceil(0.99 * len(gap)) - 1].item(), rel=1e-3)
    assert stats.loss == pytest.approx(stats.policy_loss + stats.guide_loss, rel=1e-5)
    assert math.isnan(stats.kl)  # the loss has no KL term


def test_coupled_rows_are_learnt_but_are_neither_natural_nor_guide_tokens(tiny_folder):
    sequences = a_step(prompts=2)
    first = next(i for i, s in enumerate(sequences) if not s.is_guide)
    coupled = [replace(s, coupled=i == first) for i, s in enumerate(sequences)]
    without = [s for s in sequences if s is not sequences[first]]
    found, whole, rest = (
        engine(tiny_folder("llama")).train_step(s, temperature=T) for s in (coupled, sequences, without)
    )
    assert (found.loss, found.grad_norm, found.tokens) == (whole.loss, whole.grad_norm, whole.tokens)
    assert found.natural_tokens == rest.natural_tokens == whole.natural_tokens - len(sequences[first].response_ids)
    assert found.guide_tokens == rest.guide_tokens == rest.tokens - rest.natural_tokens
    for name in ("entropy", "ratio_mean", "ratio_max", "clip_fraction", "mean_support"):
        assert getattr(found, name) == pytest.approx(getattr(rest, name), rel=1e-4), name
    assert found.entropy != pytest.approx(whole.entropy, rel=1e-4)


def test_sequences_that_cannot_matter_are_not_forwarded(tiny_folder):
    useful = a_step()
    idle = [replace(s, advantage=0.0, is_guide=False) for s in useful[:5]]
    idle += [replace(s, token_weight=0.0) for s in useful[5:8]]
    policy, other = engine(tiny_folder("qwen3-tied")), engine(tiny_folder("qwen3-tied"))
    stats = policy.train_step([*useful, *idle], temperature=T)
    without = other.train_step(useful, temperature=T)
    assert stats.forwarded_sequences == len(useful)
    assert stats.tokens == sum(len(s.response_ids) for s in useful)
    assert (stats.loss, stats.grad_norm) == (without.loss, without.grad_norm)
    for name, value in weights(policy).items():
        assert torch.equal(weights(other)[name], value), name


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("empty", [True, False])
def test_a_step_with_nothing_to_learn_moves_nothing_but_the_schedule(tiny_folder, stage, empty):
    policy = engine(tiny_folder("qwen3-tied"), zero_stage=stage, warmup_steps=4)
    policy.train_step(a_step(), temperature=T)
    before = weights(policy)
    stats = policy.train_step([] if empty else [replace(a_step()[0], advantage=0.0)], temperature=T)
    assert stats.skipped
    assert stats.grad_norm == stats.loss == 0
    assert math.isnan(stats.entropy)
    assert all(torch.equal(value, before[name]) for name, value in weights(policy).items())
    assert (policy.step, policy.skipped) == (2, 1)
    assert policy.train_step(a_step(1), temperature=T).lr == pytest.approx(QUICK["lr"] * 3 / 4)


def test_learning_rate_warms_up_linearly_then_stays(tiny_folder):
    policy = engine(tiny_folder("qwen3-tied"), lr=0.02, warmup_steps=3)
    rates = [policy.train_step(a_step(), temperature=T).lr for _ in range(5)]
    assert rates == pytest.approx([0.02 / 3, 0.04 / 3, 0.02, 0.02, 0.02])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loss_that_is_not_finite_stops_before_the_update_and_is_named(tiny_folder, stage):
    policy = engine(tiny_folder("qwen3-tied"), zero_stage=stage)
    before = weights(policy)
    sequences = a_step()
    sequences[7] = replace(sequences[7], uid="the-bad-one", advantage=float("inf"))
    with pytest.raises(NonFiniteError, match="the-bad-one"):
        policy.train_step(sequences, temperature=T)
    assert policy.step == 0
    assert all(torch.equal(value, before[name]) for name, value in weights(policy).items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_norm_that_is_not_finite_stops_before_the_update(tiny_folder, stage):
    policy = engine(tiny_folder("qwen3-tied"), zero_stage=stage)
    policy.model.base_model.layers[0].register_full_backward_hook(lambda m, i, o: (i[0] * float("inf"),))
    before = weights(policy)
    with pytest.raises(NonFiniteError, match="gradient norm is not finite"):
        policy.train_step(a_step(), temperature=T)
    assert all(torch.equal(value, before[name]) for name, value in weights(policy).items())


def test_a_log_prob_that_some_sequences_lack_is_an_error(tiny_folder):
    policy = engine(tiny_folder("qwen3-tied"))
    sequences = [s for s in a_step() if not s.is_guide]
    sequences[2] = replace(sequences[2], old_logprob=[-1.0] * len(sequences[2].response_ids))
    with pytest.raises(ValueError, match="old_logprob: missing for 11 of 12 natural"):
        policy.train_step(sequences, temperature=T)
    with_kl = PolicyEngine(tiny_folder("qwen3-tied"), EngineConfig(), loss=LossSpec(kl_coef=0.1))
    with pytest.raises(ValueError, match="ref_logprob"):
        with_kl.train_step(a_step(), temperature=T)
    corrected = PolicyEngine(tiny_folder("qwen3-tied"), EngineConfig(), loss=LossSpec(is_cap=2.0))
    with pytest.raises(ValueError, match="behaviour_logprob: missing"):
        corrected.train_step(a_step(), temperature=T)


def test_behaviour_log_probs_change_the_loss_only_when_correction_is_on(tiny_folder):
    folder = tiny_folder("qwen3-tied")
    sequences = [replace(s, behaviour_logprob=[-3.0] * len(s.response_ids)) for s in a_step()]
    plain = engine(folder).train_step(a_step(), temperature=T)
    assert engine(folder).train_step(sequences, temperature=T).loss == plain.loss
    corrected = PolicyEngine(folder, EngineConfig(**QUICK), loss=LossSpec(is_cap=2.0))
    assert corrected.train_step(sequences, temperature=T).loss != pytest.approx(plain.loss, rel=1e-2)


def test_malformed_sequences_are_refused():
    with pytest.raises(ValueError, match=r"'u'.*prompt_ids is empty"):
        TrainSequence("u", (), (1,), 1.0)
    with pytest.raises(ValueError, match="response_ids is empty"):
        TrainSequence("u", (1,), (), 1.0)
    with pytest.raises(ValueError, match="old_logprob has 1 values for 2 tokens"):
        TrainSequence("u", (1,), (1, 2), 1.0, old_logprob=[0.0])


def test_a_sequence_longer_than_the_context_is_refused(tiny_folder):
    with pytest.raises(ValueError, match="513 tokens: the model's context is 512"):
        engine(tiny_folder("qwen3-tied")).train_step(
            [TrainSequence("u", (5,) * 500, (6,) * 13, 1.0, 1.0)], temperature=T
        )


def test_heads_that_would_give_wrong_log_probs_are_refused():
    wrapped = tiny_model("qwen3", 64)
    wrapped.set_output_embeddings(nn.Sequential(wrapped.get_output_embeddings()))
    with pytest.raises(ValueError, match=r"expected a plain nn\.Linear, found Sequential"):
        install_head(wrapped, LossSpec(), 64)
    capped = tiny_model("qwen3", 64)
    capped.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        install_head(capped, LossSpec(), 64)


def test_the_replaced_head_still_gives_logits(tiny_folder):
    policy, plain = engine(tiny_folder("llama")), plain_model(tiny_folder("llama"))
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(policy.model(ids).logits, plain(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_missing_or_damaged_model_is_a_clear_error(tiny_folder, tmp_path):
    with pytest.raises(OSError, match="neither a local folder nor a hub id"):
        engine(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match="not a complete transformers folder"):
        engine(tmp_path / "empty")
    cut = tmp_path / "cut"
    shutil.copytree(tiny_folder("qwen3-tied"), cut)
    weights_file = cut / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-100])
    with pytest.raises(
        OSError, match=r"cut is not a complete transformers folder: model\.safetensors cannot be read: "
    ):
        engine(cut)
    tensors = load_file(tiny_folder("qwen3-tied") / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "layers.1.mlp.up" not in k}, weights_file, {"format": "pt"})
    with pytest.raises(OSError, match=r"lacks 1 of its weights \(first: model.layers.1.mlp.up_proj.weight\)"):
        engine(cut)
