"""Importance correction between rollout engine and trainer: token by token, or a whole response at once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rise_engine.config import EngineConfig
from rise_engine.policy import PolicyEngine
from rise_kernels.token_losses import LossSpec
from rise_rl.config import ConfigError, load_config
from rise_rl.update import update
from tests.engine.helpers import GAMMA, a_step, plain_logprobs, plain_model
from tests.trainer.test_trainer import run

T = 0.7
CAP = 1.3
QUICK = {"lr": 0.1, "eps": 1e-2, "warmup_steps": 0, "micro_batch_tokens": 45}


@pytest.mark.parametrize("correction", ["token", "sequence"])
def test_the_factor_multiplies_the_surrogate_of_natural_rows(tiny_folder, correction):
    model = plain_model(tiny_folder, torch.float64)
    g = torch.Generator().manual_seed(0)
    loss, kept, sequences = torch.zeros((), dtype=torch.float64), [], []
    for s in a_step(prompts=2):
        logp = plain_logprobs(model, s.prompt_ids, s.response_ids, T)
        own = logp.detach()
        if s.is_guide:
            token = -torch.log(logp.exp() / (logp.exp() + GAMMA))
        else:
            behaviour = own + 0.2 * torch.randn(own.shape, generator=g, dtype=torch.float64)
            s = replace(s, behaviour_logprob=behaviour.tolist())
            log_factor = own - behaviour if correction == "token" else (own - behaviour).sum()[None]
            kept.append(log_factor.exp() <= CAP)
            token = -s.advantage * (logp - own).exp() * log_factor.exp().clamp(max=CAP)
        sequences.append(s)
        loss = loss + s.token_weight * token.sum()
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    share = torch.cat(kept).double().mean().item()
    assert 0 < share < 1

    spec = LossSpec(is_cap=CAP if correction == "token" else None)
    policy = PolicyEngine(tiny_folder, EngineConfig(**QUICK), loss=spec)
    stats = update(policy, [sequences], temperature=T, sequence_cap=CAP if correction == "sequence" else None)
    assert stats.loss == pytest.approx(loss.item(), rel=1e-4)
    assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
    assert stats.importance_kept == pytest.approx(share)
    assert stats.ratio_mean == stats.ratio_max == 1.0


def test_a_response_without_behaviour_log_probs_is_no_silent_factor_of_one(tiny_folder):
    policy = PolicyEngine(tiny_folder, EngineConfig(**QUICK))
    with pytest.raises(ValueError, match="behaviour_logprob: sequence 'p0' has none"):
        update(policy, [a_step()], temperature=T, sequence_cap=CAP)


@pytest.mark.parametrize("correction", ["token", "sequence"])
def test_a_run_logs_what_is_kept_and_an_exact_engine_keeps_everything(tiny_config, correction):
    config = tiny_config(steps=1, evaluation__every=0, checkpoint__every=0)
    [plain], _ = run(config, "name=plain")
    [m], _ = run(config, "name=corrected", f"grpo.importance_correction={correction}")
    assert m["importance/kept"] == 1.0
    assert plain["importance/kept"] is None
    assert m["loss"] == pytest.approx(plain["loss"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    "changes, message",
    [
        (["rollout.top_p=0.8", "rollout.subset_sampling=true"], "subset_sampling .* another distribution"),
        (["guidance.coupled=true"], "coupled answers were sampled under another prompt"),
        (["scaffold.enabled=true", "guidance.enabled=false"], "scaffolded .* sampled under another prompt"),
    ],
)
def test_correction_is_refused_where_behaviour_log_probs_mean_something_else(tiny_config, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_config(tiny_config(), ["grpo.importance_correction=token", *changes])
