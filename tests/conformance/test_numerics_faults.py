"""Faults that peers shipped in low precision: updates lost in bfloat16 weights, gradients added up in bfloat16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rise_engine.config import EngineConfig
from rise_engine.deepspeed_config import deepspeed_config
from rise_engine.policy import PolicyEngine
from tests.engine.helpers import a_step
from tests.tiny import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("m") / "m", "qwen3-tied")


def masters(policy: PolicyEngine) -> torch.Tensor:
    """The float32 weights that the optimizer moves, flat."""
    optimizer = policy.engine.optimizer
    name = "single_partition_of_fp32_groups" if hasattr(optimizer, "single_partition_of_fp32_groups") else None
    flat = getattr(optimizer, name or "fp32_partitioned_groups_flat")
    return torch.cat([p.detach().flatten() for p in flat]).clone()


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_float32_master_weights_move_at_lr_1e_6_in_bfloat16(folder, stage):
    """A bfloat16 weight of 1 cannot move by 1e-6; its float32 master must, and the sum of many moves must arrive."""
    policy = PolicyEngine(folder, EngineConfig(dtype="bfloat16", zero_stage=stage, lr=1e-6, warmup_steps=0))
    assert next(policy.model.parameters()).dtype == torch.bfloat16
    before = masters(policy)
    assert before.dtype == torch.float32
    steps = 3
    for _ in range(steps):
        policy.train_step(a_step(), temperature=1.0)
    moved = (masters(policy) - before).abs()
    assert moved.max() <= steps * 1.2e-6
    assert (moved > 0.5e-6).float().mean() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_many_micro_batches_add_up_in_float32(folder, stage):
    """One large gradient and many that are each below half of its bfloat16 spacing: added in bfloat16 they vanish."""
    large = a_step(prompts=1)[0]
    small = replace(large, token_weight=large.token_weight / 500)
    sequences = [large] + [small] * 50
    many, alone = (
        PolicyEngine(folder, EngineConfig(dtype="bfloat16", zero_stage=stage, micro_batch_tokens=1)) for _ in range(2)
    )
    single = alone.train_step([large], temperature=1.0).grad_norm
    assert many.train_step(sequences, temperature=1.0).grad_norm == pytest.approx(1.1 * single, rel=5e-3)


@pytest.mark.parametrize("stage", [0, 1])
def test_lower_stages_run_as_stage_2_in_bfloat16(stage):
    """DeepSpeed's stage 0 would accumulate in bfloat16 and take Adam's first step with a gradient of zero."""
    settings = deepspeed_config(EngineConfig(dtype="bfloat16", zero_stage=stage), world_size=1)
    assert settings["zero_optimization"]["stage"] == 2
    assert settings["data_types"]["grad_accum_dtype"] == "fp32"
    assert deepspeed_config(EngineConfig(dtype="float32", zero_stage=stage), 1)["zero_optimization"]["stage"] == stage


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_first_bfloat16_update_has_the_size_of_the_float32_one(folder, stage):
    """A quarter less is what a zero-gradient step before it makes of Adam's bias correction."""
    moves = {}
    for dtype in ("float32", "bfloat16"):
        policy = PolicyEngine(folder, EngineConfig(dtype=dtype, zero_stage=stage, lr=1e-3, warmup_steps=0))
        before = masters(policy)
        policy.train_step(a_step(), temperature=1.0)
        moves[dtype] = (masters(policy) - before).abs().median().item()
    assert moves["bfloat16"] == pytest.approx(moves["float32"], rel=0.02)
