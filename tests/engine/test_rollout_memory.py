"""What sampling and handing weights over are planned to hold, against the sizes that vLLM and DeepSpeed work with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rise_engine.memory_plan import Setting, Workload, plan_memory
from rise_engine.model_shapes import PUBLISHED
from rise_engine.rollout.vllm_start import cache_bytes
from rise_engine.rollout_memory import CUDA_GRAPHS, vllm_needs, vllm_rows, vllm_share, weights_under_way
from rise_engine.weights_stream import BUCKET_BYTES, buckets
from tests.engine.planned import GIB, SETTING, WORK, small


def test_vllm_takes_its_share_while_it_samples_and_little_of_it_asleep():
    shape = small()
    gpu = replace(SETTING, on_cpu=False, vllm=0.5)
    plan = plan_memory(shape, WORK, gpu, 10 * GIB)
    for phase in ("sync", "rollout"):
        assert plan.phases[phase]["vLLM"] == 5 * GIB
        assert "optimizer" not in plan.phases[phase]
    assert plan.host["optimizer"] == plan.phases["update"]["optimizer"] == 8 * shape.parameters
    assert plan.phases["update"]["vLLM"] == CUDA_GRAPHS
    split = plan_memory(shape, WORK, replace(gpu, stage=2, ranks=4), 10 * GIB)  # the float32 master weights stay
    assert split.phases["rollout"]["optimizer"] == 4 * shape.parameters / 4
    assert split.host["optimizer"] == 8 * shape.parameters / 4
    assert plan_memory(shape, WORK, replace(gpu, vllm_sleep=0), 10 * GIB).phases["update"]["vLLM"] == 5 * GIB


def test_only_its_parts_and_the_bucket_stay_of_a_zero_3_model_while_answers_are_sampled():
    shape = small()
    split = replace(SETTING, on_cpu=False, dtype_bytes=2, stage=3, ranks=4, vllm=0.5, bucket=1000)
    phases = plan_memory(shape, WORK, split, 10 * GIB).phases
    assert phases["update"]["gathered"] == 2 * shape.parameters
    assert set(phases["rollout"]) == {"parameters", "optimizer", "DeepSpeed buffers", "vLLM"}
    assert phases["rollout"]["DeepSpeed buffers"] == 2000


@pytest.mark.parametrize("tied", [True, False])
def test_weights_under_way_are_buckets_twice_under_zero_3_and_one_layer_of_vllm_elsewhere(tied):
    """Walked through with the real buckets: gathered and copied, then the copies beside the layer that vLLM builds."""
    shape = replace(PUBLISHED["Qwen/Qwen3-14B"], tied=tied)
    whole = replace(SETTING, dtype_bytes=2, stage=2, ranks=8, vllm=0.5)
    assert weights_under_way(shape, whole) == 2 * shape.embedding  # larger than 2 x 17408 x 5120
    assert weights_under_way(shape, replace(whole, vllm_ranks=2)) == shape.embedding
    assert weights_under_way(replace(shape, vocabulary=1000), whole) == 2 * 2 * 17408 * 5120  # gate and up as one
    # As WeightSync walks it, a tied head under its own name too.
    sizes = [*shape.matrices(), *([shape.embedding] if tied else [])]
    named = [
        (str(i), torch.nn.Parameter(torch.empty(n, dtype=torch.bfloat16, device="meta"))) for i, n in enumerate(sizes)
    ]
    largest = max(sum(p.nbytes for _, p in bucket) for bucket in buckets(named, BUCKET_BYTES))
    assert weights_under_way(shape, replace(whole, stage=3)) == 2 * largest
    narrow = replace(shape, vocabulary=1000)
    assert weights_under_way(narrow, replace(whole, stage=3)) == 2 * (512 << 20)


def test_merging_an_adapter_takes_four_float32_copies_of_the_largest_linear_map():
    shape = PUBLISHED["Qwen/Qwen3-14B"]
    lora = replace(SETTING, dtype_bytes=2, stage=2, lora_rank=32, vllm=0.5)
    assert weights_under_way(shape, lora) == max(2 * shape.embedding, 16 * 17408 * 5120)


def test_vllms_cache_is_what_its_share_leaves_beside_weights_graphs_and_a_prefill():
    shape, device = PUBLISHED["Qwen/Qwen3-4B"], 80 * GIB
    work = Workload(4096, 8192, 16, micro_batch=16384, packed=True, several=True, rows=64, hint=1024)
    s = Setting(ranks=8, stage=2, dtype_bytes=2, checkpointing=True, head_budget=512 << 20, vllm=0.5)
    row = 2 * 36 * 8 * 128 * 2 * 13312  # keys and values, layers, heads, their size, bfloat16, tokens
    block = row // 13312 * 16
    fixed = 2 * shape.parameters + CUDA_GRAPHS + 16384 * 2 * (2 * 2560 + 3 * 9728) + block
    assert vllm_rows(shape, work, s, device) == (40 * GIB - fixed) // row == 16
    assert vllm_needs(shape, work, s, device, rows=16) <= 40 * GIB < vllm_needs(shape, work, s, device, rows=17)
    halved = replace(s, vllm_ranks=2)
    less = vllm_needs(shape, work, s, device) - vllm_needs(shape, work, halved, device)
    assert less == pytest.approx(shape.parameters + row / 2 + block / 2 + 16384 * 2 * 3 * 9728 / 2)
    # Many rows: sampling takes more than a prefill.
    many = vllm_needs(shape, replace(work, rows=4096), s, device) - vllm_needs(shape, work, s, device)
    assert many == 4096 * 151_936 * 5 * 4 - 16384 * 2 * (2 * 2560 + 3 * 9728)


def test_on_a_cpu_ranks_that_hold_one_model_together_hold_a_part_of_its_cache_each():
    """As much as vLLM is told to take there."""
    config = SimpleNamespace(num_hidden_layers=3, num_key_value_heads=2, head_dim=16)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config), dtype=torch.float32)
    policy = SimpleNamespace(model=model)
    work = replace(WORK, rows=7, hint=10, response=50)  # 160 tokens, whole blocks of 32
    for ranks in (1, 2):
        given = cache_bytes(policy, 160, 7, ranks)
        assert given == 8 * 160 * 3 * 2 * (2 // ranks * 16) * 4
        shape, s = small(), replace(SETTING, vllm=0.5, vllm_ranks=ranks)
        assert vllm_share(shape, work, s, 0) == 4 * shape.parameters / ranks + given


def test_the_kv_cache_is_what_max_rows_answers_need():
    shape = small()
    found = plan_memory(shape, replace(WORK, rows=7, hint=30), SETTING).phases["rollout"]["KV cache"]
    assert found == 7 * (100 + 30 + 50) * 3 * 2 * (2 * 16) * 4
