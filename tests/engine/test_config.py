"""The engine's configuration says no early, and the DeepSpeed configuration follows from it."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from rise_engine.config import EngineConfig, OffloadConfig
from rise_engine.deepspeed_config import deepspeed_config
from rise_engine.errors import EngineError
from rise_engine.optimizer import build_optimizer


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"learning_rate": 1e-6}, "learning_rate"),
        ({"zero_stage": 4}, "zero_stage"),
        ({"lr": -1.0}, "lr"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens"),
        ({"offload": {"optimiser": True}}, "optimiser"),
        (
            {"offload": {"parameters": True}, "zero_stage": 2},
            "offload.parameters needs zero_stage 3",
        ),
        ({"offload": {"optimizer": True}, "zero_stage": 0}, "offload.optimizer needs zero_stage 1, 2 or 3"),
    ],
)
def test_mistakes_are_refused_by_name(keys, message):
    with pytest.raises(ValidationError, match=message):
        EngineConfig(**keys)


def test_every_key_is_described():
    for model in (EngineConfig, OffloadConfig):
        for name, field in model.model_fields.items():
            assert field.description, name
            assert field.description.endswith("."), name


@pytest.mark.parametrize("world_size", [1, 4])
def test_deepspeed_divides_by_nothing(world_size):
    """The batch sizes DeepSpeed would divide by are 1 per rank, and accumulation is not its business."""
    settings = deepspeed_config(EngineConfig(zero_stage=2, clip_norm=0.5), world_size)
    assert settings["train_batch_size"] == world_size
    assert settings["train_micro_batch_size_per_gpu"] == settings["gradient_accumulation_steps"] == 1
    assert settings["managed_gradient_accumulation"] is False
    assert settings["gradient_clipping"] == 0.5
    assert settings["data_types"] == {"grad_accum_dtype": "fp32"}


def test_offload_and_raw_overrides_are_merged_last():
    settings = deepspeed_config(
        EngineConfig(
            zero_stage=3,
            offload=OffloadConfig(optimizer=True, parameters=True, pin_memory=False),
            deepspeed={"zero_optimization": {"reduce_bucket_size": 1000}, "wall_clock_breakdown": True},
        ),
        1,
    )
    zero = settings["zero_optimization"]
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert (zero["stage"], zero["reduce_bucket_size"], settings["wall_clock_breakdown"]) == (3, 1000, True)


def test_the_dtype_follows_the_device_when_it_is_not_given(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not deepspeed_config(EngineConfig(), 1)["bf16"]["enabled"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert deepspeed_config(EngineConfig(), 1)["bf16"]["enabled"]


def test_a_cpu_adam_that_cannot_be_built_says_what_it_takes(monkeypatch):
    def build(*args, **keys):
        raise RuntimeError("g++ not found")

    monkeypatch.setattr("deepspeed.ops.adam.DeepSpeedCPUAdam", build)
    config = EngineConfig(zero_stage=2, offload=OffloadConfig(optimizer=True))
    with pytest.raises(EngineError, match=r"engine\.offload\.optimizer: .* C\+\+ compiler.*g\+\+ not found"):
        build_optimizer(torch.nn.Linear(2, 2), config)
