"""The memory plan's arithmetic against real models and DeepSpeed's own buffers; slow tests: against measured peaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rise_engine import attention
from rise_engine.config import EngineConfig, LoraSettings
from rise_engine.head import install_head
from rise_engine.lora import add_adapters
from rise_engine.memory_advice import _changes, advise, largest_share, vllm_starts
from rise_engine.memory_plan import (
    ModelShape,
    Setting,
    Workload,
    activations,
    full_logits,
    head_workspace,
    kept_gradients,
    plan_memory,
)
from rise_engine.model_shapes import PUBLISHED, model_shape
from rise_engine.packing import build, plan
from rise_engine.plan_settings import setting_of
from rise_engine.policy import PolicyEngine, PolicyModule
from rise_engine.rollout.vllm_config import VllmConfig
from rise_engine.sequences import TrainSequence
from rise_engine.token_rows import make_rows
from rise_kernels.token_losses import LossSpec
from tests.engine.planned import FIELDS, GIB, KIND, SETTING, WORK, small

ROOT = Path(__file__).parents[2]


# --- parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", list(KIND))
def test_parameters_are_those_of_the_real_model(kind, tied):
    config_class, model_class = KIND[kind]
    fields = {k: v for k, v in FIELDS.items() if not (kind == "qwen2" and k == "head_dim")}
    config = config_class(**fields, tie_word_embeddings=tied)
    real = list(model_class(config).parameters())
    shape = ModelShape.from_config(config.to_dict())
    assert list(shape.matrices()) == [p.numel() for p in real if p.ndim == 2]
    assert sum(shape.vectors()) == sum(p.numel() for p in real if p.ndim == 1)
    assert shape.parameters == sum(p.numel() for p in real)


@pytest.mark.parametrize(
    "name, total, outside",
    [
        ("0.6B", 0.6, 0.44),
        ("1.7B", 1.7, 1.4),
        ("4B", 4.0, 3.6),
        ("8B", 8.2, 6.95),
        ("14B", 14.8, 13.2),
        ("32B", 32.8, 31.2),
    ],
)
def test_published_shapes_have_the_published_numbers_of_parameters(name, total, outside):
    """Model cards of Qwen3: billions of parameters, and of those outside the embedding."""
    shape = PUBLISHED[f"Qwen/Qwen3-{name}"]
    assert shape.parameters / 1e9 == pytest.approx(total, abs=0.05)
    embeddings = shape.embedding * (1 if shape.tied else 2)
    assert (shape.parameters - embeddings) / 1e9 == pytest.approx(outside, abs=0.05)


def test_models_that_cannot_be_planned_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"model_type: expected one of qwen3, .* found 'gemma3'"):
        ModelShape.from_config({"model_type": "gemma3"})
    with pytest.raises(ValueError, match="hidden_size, num_attention_heads, max_position_embeddings: missing"):
        ModelShape.from_config(
            {"model_type": "qwen3", "vocab_size": 10, "intermediate_size": 4, "num_hidden_layers": 1}
        )
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not a JSON file"):
        model_shape(tmp_path)
    broken.write_text("[]")
    with pytest.raises(ValueError, match="expected an object"):
        model_shape(broken)


# --- activations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, 8])
@pytest.mark.parametrize("packed, response", [(True, 50), (True, 150), (False, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_activations_are_the_bytes_that_autograd_saves(kind, dtype, packed, response, lora):
    """Counted with hooks on everything that a forward pass saves, parameters aside, each storage once."""
    config_class, model_class = KIND[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**FIELDS, tie_word_embeddings=True)).to(dtype).train()
    model.set_attn_implementation(attention.NAME if packed else "sdpa")
    if lora:
        add_adapters(model, LoraSettings(rank=lora))
    install_head(model, LossSpec(), 64)
    work = replace(WORK, packed=packed, response=response, several=False, micro_batch=10**6)
    sequences = [
        TrainSequence("0", tuple(range(work.prompt)), tuple(range(i, i + work.response)), 1e-3, (-1.0) ** i)
        for i in range(work.group)
    ]
    name = "shared_prompt" if packed else "padded"
    batch = build(sequences, plan(sequences, 10**6, name)[0], name, pad_id=0, device=torch.device("cpu"))
    rows = make_rows(batch, sequences, LossSpec(), scale=1.0, device=torch.device("cpu"))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        PolicyModule(model)(batch, rows, temperature=1.0)
    found = sum(size for size, _ in saved.values())
    shape = small(kind, tie_word_embeddings=True)
    b = dtype.itemsize
    forward, _ = activations(shape, work, replace(SETTING, dtype_bytes=b, lora_rank=lora))
    # Beside activations autograd holds dH and the float32 dW of the head. Rotary tables and indices are not planned.
    planned = forward - batch.tokens * b * shape.hidden + work.scored * b * shape.hidden
    if lora is None:
        planned += 4 * shape.embedding
    else:  # the frozen embedding wants no gradient, so the first norm keeps nothing; planned all the same
        planned -= 4 * batch.tokens * shape.hidden
    assert found == pytest.approx(planned, rel=0.03)


def test_checkpointing_keeps_one_layer_and_the_inputs_of_the_others():
    shape = small()
    kept = replace(SETTING, checkpointing=True)
    deep = replace(shape, layers=shape.layers + 10)
    more = activations(deep, WORK, kept)[1] - activations(shape, WORK, kept)[1]
    assert more == 10 * WORK.tokens * 4 * shape.hidden


def test_a_packed_group_repeats_the_prompts_keys_and_needs_a_mask():
    assert (WORK.tokens, WORK.responses, WORK.keys) == (4096, 4, 4096 + 4 * 100)
    assert WORK.mask == 50 * 150
    alone = replace(WORK, micro_batch=100)
    assert (alone.tokens, alone.responses, alone.mask, alone.keys) == (150, 1, 0, 150)
    long = replace(WORK, response=101)
    assert (WORK.square, WORK.queries) == (False, 4096)
    assert (long.square, long.mask, long.queries, long.keys) == (True, 0, 4096 + 4 * 100, 4096 + 4 * 100)
    padded = replace(WORK, packed=False, micro_batch=310)
    assert (padded.tokens, padded.responses, padded.scored, padded.mask) == (310, 2, 110, 0)


# --- weights, gradients, optimizer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_zero_divides_what_it_divides(ranks):
    shape = small(tie_word_embeddings=True)
    p = shape.parameters
    at = {s: plan_memory(shape, WORK, replace(SETTING, ranks=ranks, stage=s)).phases["update"] for s in range(4)}
    assert at[0]["parameters"] == at[1]["parameters"] == at[2]["parameters"] == 4 * p
    assert at[3]["parameters"] == 4 * p / ranks
    assert at[0]["optimizer"] == 8 * p
    assert at[1]["optimizer"] == at[2]["optimizer"] == at[3]["optimizer"] == pytest.approx(12 * p / ranks)
    assert at[0]["gradients"] == at[1]["gradients"] == 4 * p
    assert at[3]["gradients"] == 4 * p / ranks
    halves = plan_memory(shape, WORK, replace(SETTING, ranks=ranks, stage=2, dtype_bytes=2)).phases["update"]
    assert (halves["parameters"], halves["gradients"]) == (2 * p, 4 * p / ranks)


def test_gradients_of_a_rank_are_whole_tensors_in_float32():
    """Shares of 4 tensors of 1, 5, 5, 1 on two ranks: [1, 5] and [5, 1]; on three: [1, 5-], [-5, 5-], [-5, 1]."""

    class Known(ModelShape):
        def matrices(self):
            yield from (1, 5, 5, 1)

    shape = Known(**vars(small()))
    assert kept_gradients(shape, replace(SETTING, ranks=2)) == 6
    assert kept_gradients(shape, replace(SETTING, ranks=3)) == 10


def test_lora_trains_adapters_and_no_head():
    shape = small()
    full, low = (plan_memory(shape, WORK, replace(SETTING, lora_rank=r)) for r in (None, 4))
    adapters = 4 * shape.layers * sum(out + inner for out, inner in shape.linears)
    assert low.phases["update"]["optimizer"] == 8 * adapters
    assert low.phases["update"]["gradients"] == 4 * adapters
    assert "head dW and casts" in full.phases["dW"]
    assert "head dW and casts" not in low.phases["dW"]


def test_offloaded_state_is_on_the_host():
    shape = small()
    p = shape.parameters
    away = replace(SETTING, stage=3, ranks=4, offload_optimizer=True, offload_parameters=True)
    plan = plan_memory(shape, WORK, replace(away, on_cpu=False))
    assert "optimizer" not in plan.phases["update"]
    assert "parameters" not in plan.phases["update"]
    assert plan.host["optimizer"] == 12 * p / 4
    assert plan.host["parameters"] == (4 + 4) * p / 4
    one_memory = plan_memory(shape, WORK, away)
    assert one_memory.host == {}
    assert one_memory.phases["update"]["optimizer"] == 12 * p / 4


def test_the_head_takes_its_budget_where_full_logits_would_take_nine_gib():
    shape = PUBLISHED["Qwen/Qwen3-0.6B"]
    work = replace(WORK, prompt=128, response=8192, micro_batch=8320, group=1)
    assert work.scored == 8192
    assert full_logits(shape, work) == 8192 * 151_936 * 4 * 2 > 9 * GIB
    assert head_workspace(shape, work, replace(SETTING, on_cpu=False)) == 512 << 20


def test_settings_follow_the_deepspeed_configuration_that_is_built():
    raw = {"zero_optimization": {"reduce_bucket_size": 1000, "stage3_max_live_parameters": 77}}
    config = EngineConfig(zero_stage=0, deepspeed=raw, activation_checkpointing=True)
    shared = VllmConfig(memory_fraction=0.3, sleep=1, tensor_parallel_size=2)
    gpu = setting_of(config, ranks=8, on_cpu=False, vllm=shared)
    assert (gpu.stage, gpu.dtype_bytes, gpu.bucket, gpu.live, gpu.overlap) == (2, 2, 1000, 77, True)
    assert (gpu.vllm, gpu.vllm_sleep, gpu.vllm_ranks, gpu.checkpointing, gpu.ranks) == (0.3, 1, 2, True, 8)
    cpu = setting_of(config, ranks=1, on_cpu=True)
    assert (cpu.stage, cpu.dtype_bytes, cpu.overlap, cpu.vllm) == (0, 4, False, None)


# --- advice ---------------------------------------------------------------------------------------------------------


def test_advice_makes_it_fit_and_adds_up():
    shape = PUBLISHED["Qwen/Qwen3-4B"]
    work = Workload(4096, 8192, 16, micro_batch=16384, packed=True, several=True, rows=64, hint=1024)
    setting = Setting(ranks=8, stage=2, dtype_bytes=2, checkpointing=False, head_budget=512 << 20, overlap=True)
    before = plan_memory(shape, work, setting).peak
    advice = advise(shape, work, setting, 60 * GIB)
    keys = [a.key for a in advice]
    assert keys.index("engine.micro_batch_tokens") < keys.index("engine.activation_checkpointing") < len(keys)
    assert "engine.offload.optimizer" not in keys
    assert advice[-1].peak <= 60 * GIB < before
    assert before - sum(a.saves for a in advice) == pytest.approx(advice[-1].peak)
    # Made by hand, they give the peak that was promised.
    made = {key: int(value) for key, value in ((a.key, a.value) for a in advice) if value.isdigit()}
    work = replace(work, micro_batch=made["engine.micro_batch_tokens"], rows=made.get("rollout.max_rows", 64))
    bucket = made.get("engine.deepspeed.zero_optimization.reduce_bucket_size", setting.bucket)
    assert advice[-1].peak == plan_memory(shape, work, replace(setting, checkpointing=True, bucket=bucket)).peak


def test_there_is_no_advice_where_it_fits_and_only_true_savings_elsewhere():
    shape = PUBLISHED["Qwen/Qwen3-4B"]
    setting = Setting(ranks=1, stage=2, dtype_bytes=2, checkpointing=True, head_budget=512 << 20)
    assert advise(shape, WORK, setting, 10**15) == []
    advice = advise(shape, WORK, setting, 0.0)
    assert advice
    assert all(a.saves > 0 for a in advice)
    assert "engine.zero_stage" not in [a.key for a in advice]  # one rank has nobody to share with


def test_a_share_that_leaves_vllm_no_cache_is_raised_and_one_that_leaves_the_trainer_too_little_lowered():
    shape, device, limit = PUBLISHED["Qwen/Qwen3-4B"], 80 * GIB, 75 * GIB
    work = Workload(4096, 8192, 16, micro_batch=16384, packed=True, several=True, rows=64, hint=1024)
    s = Setting(ranks=8, stage=2, dtype_bytes=2, checkpointing=True, head_budget=512 << 20, bucket=10**7, vllm=0.1)
    assert not vllm_starts(shape, work, s, device)
    [raised] = advise(shape, work, s, limit, device)
    assert raised.key == "rollout.vllm.memory_fraction"
    assert vllm_starts(shape, work, replace(s, vllm=float(raised.value)), device)
    assert not vllm_starts(shape, work, replace(s, vllm=float(raised.value) - 0.05), device)
    [lowered] = advise(shape, work, replace(s, vllm=0.9), limit, device)
    assert (lowered.key, float(lowered.value)) == (raised.key, largest_share(shape, work, s, limit, device))
    assert lowered.peak <= limit < plan_memory(shape, work, replace(s, vllm=float(lowered.value) + 0.05), device).peak
    assert advise(shape, work, replace(s, vllm=float(lowered.value)), limit, device) == []


def test_a_model_too_large_for_one_gpu_beside_the_trainer_is_spread_over_more():
    shape, device, limit = PUBLISHED["Qwen/Qwen3-32B"], 80 * GIB, 75 * GIB
    work = Workload(4096, 8192, 16, micro_batch=12288, packed=True, several=True, rows=64, hint=1024)
    s = Setting(ranks=8, stage=3, dtype_bytes=2, checkpointing=True, head_budget=512 << 20, bucket=10**7, vllm=0.5)
    first = advise(shape, work, s, limit, device)[0]
    assert first.key == "rollout.vllm.tensor_parallel_size"
    assert first.value == "2"
    assert vllm_starts(shape, work, replace(s, vllm_ranks=2), device)
    first = advise(shape, work, replace(s, vllm=0.2), limit, device)[0]
    assert first.value.startswith("2 (and rollout.vllm.memory_fraction=0.")
    share = float(first.value.partition("=")[2].rstrip(")"))
    assert vllm_starts(shape, work, replace(s, vllm=share, vllm_ranks=2), device)
    assert not vllm_starts(shape, work, replace(s, vllm=share - 0.05, vllm_ranks=2), device)
    # With an odd number of ranks there is nobody to share it with.
    assert "tensor_parallel_size" not in str(advise(shape, work, replace(s, ranks=7), limit, device))


def test_stage_3_is_not_advised_where_every_rank_samples_with_transformers():
    keys = [key for key, *_ in _changes(WORK, replace(SETTING, ranks=2, on_cpu=False))]
    stages = [value for key, value, *_ in _changes(WORK, replace(SETTING, ranks=2, on_cpu=False)) if "stage" in key]
    assert [v[0] for v in stages] == ["2"]
    assert "engine.offload.parameters" not in keys
    with_vllm = [v[0] for k, v, *_ in _changes(WORK, replace(SETTING, ranks=2, on_cpu=False, vllm=0.5)) if "stage" in k]
    assert with_vllm == ["2", "3"]


def test_offloading_is_advised_with_the_stage_that_it_needs():
    """Alone, neither key loads under the default stage 0, also where bfloat16 makes it run as 2."""
    value = {key: value for key, value, *_ in _changes(WORK, replace(SETTING, stage=2, on_cpu=False))}
    for name, stage in (("optimizer", 2), ("parameters", 3)):
        assert value[f"engine.offload.{name}"] == f"true (and engine.zero_stage={stage})"
        EngineConfig(zero_stage=stage, offload={name: True})
        with pytest.raises(ValueError, match=f"offload.{name} needs zero_stage"):
            EngineConfig(zero_stage=0, offload={name: True})


# --- DeepSpeed's own buffers, and measured peaks --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zero_partitions_are_those_of_the_plan(tiny_folder, dtype):
    policy = PolicyEngine(tiny_folder("qwen3"), EngineConfig(zero_stage=2, dtype=dtype))
    shape = model_shape(tiny_folder("qwen3"))
    planned = plan_memory(shape, WORK, setting_of(policy.config, ranks=1, on_cpu=True)).phases["update"]
    optimizer = policy.engine.optimizer
    b = policy.config.torch_dtype.itemsize
    masters = sum(t.nbytes for t in optimizer.single_partition_of_fp32_groups)
    assert sum(t.nbytes for t in optimizer.bit16_groups_flat) == pytest.approx(planned["parameters"], abs=8 * b)
    assert 3 * masters == pytest.approx(planned["optimizer"], abs=200)  # DeepSpeed pads shares by some elements


@pytest.mark.slow
@pytest.mark.parametrize("case", ["stage0", "stage0-checkpointing", "stage2-bf16-small-bucket"])
def test_the_planned_peak_is_within_a_tenth_of_the_measured_one(case, tmp_path):
    """Models of more than 3 GiB of tensors, in processes of their own (bench/memory_plan.py)."""
    script = ROOT / "bench" / "memory_plan.py"
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    subprocess.run(
        [sys.executable, str(script), "--cases", case, "--out", str(tmp_path)], check=True, env=environment, timeout=900
    )
    found = json.loads((tmp_path / "memory_plan.json").read_text())["results"][case]
    assert found["measured"] > 3 * GIB
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.1)
