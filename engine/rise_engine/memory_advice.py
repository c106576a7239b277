"""What to change in a configuration whose memory plan does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from .deepspeed_config import REDUCE_BUCKET
from .memory_plan import ModelShape, Setting, Workload, plan_memory
from .rollout_memory import FLOAT32, vllm_needs, vllm_rows, vllm_share


@dataclass(frozen=True)
class Advice:
    """One change: key=value, and the peak once it and those before it are made."""

    key: str
    value: str
    saves: float
    peak: float


Change = tuple[str, str, dict[str, Any], dict[str, Any]]
"""(key, value, fields of Workload, fields of Setting)."""
STEP = 0.05
"""vLLM's share of a GPU is advised in multiples of this."""


def advise(shape: ModelShape, work: Workload, setting: Setting, limit: float, device_bytes: int = 0) -> list[Advice]:
    """Changes until vLLM can start and the peak is within `limit` bytes: first a share of the GPU with which it starts,
    which may save nothing, then each time the one that costs least among those that save at least 1 % after the earlier
    ones. The list may end before it fits: then only more ranks or memory help.
    """
    made: list[Advice] = []
    peak = plan_memory(shape, work, setting, device_bytes).peak

    def make(change: Change, at_least: float) -> bool:
        nonlocal peak, work, setting
        key, value, new_work, new_setting = change
        changed = replace(work, **new_work), replace(setting, **new_setting)
        new = plan_memory(shape, *changed, device_bytes).peak
        if peak - new < at_least:
            return False
        made.append(Advice(key, value, peak - new, new))
        peak, (work, setting) = new, changed
        return True

    if not vllm_starts(shape, work, setting, device_bytes):
        shares = list(_shares(shape, work, setting, limit, device_bytes))
        fitting = [c for c in shares if _sampling_peak(shape, work, replace(setting, **c[3]), device_bytes) <= limit]
        for change in (fitting or shares)[:1]:
            make(change, -math.inf)
    while peak > limit:
        changes = chain(_shares(shape, work, setting, limit, device_bytes), _changes(work, setting))
        if not any(make(change, 0.01 * peak) for change in changes):
            break
    return made


def vllm_starts(shape: ModelShape, work: Workload, s: Setting, device_bytes: int) -> bool:
    """Whether its share of a GPU has room for one answer of full length, without which vLLM refuses to start."""
    return s.vllm is None or s.on_cpu or vllm_rows(shape, work, s, device_bytes) >= 1


def largest_share(shape: ModelShape, work: Workload, s: Setting, limit: float, device_bytes: int) -> float:
    """The largest memory_fraction, in multiples of STEP, with which sampling stays within `limit`."""
    beside = _sampling_peak(shape, work, s, device_bytes) - vllm_share(shape, work, s, device_bytes)
    return math.floor((limit - beside) / device_bytes / STEP + 1e-9) * STEP


def _sampling_peak(shape: ModelShape, work: Workload, s: Setting, device_bytes: int) -> float:
    plan = plan_memory(shape, work, s, device_bytes)
    return max(plan.total("sync"), plan.total("rollout"))


def _shares(shape: ModelShape, work: Workload, s: Setting, limit: float, device_bytes: int) -> Iterator[Change]:
    """The share of a GPU that fits beside the trainer, or else the least one that vLLM starts with; alone, and with the
    model spread over more ranks.
    """
    if s.vllm is None or s.on_cpu:
        return
    ranks = s.vllm_ranks
    while s.ranks % ranks == 0:
        spread = replace(s, vllm_ranks=ranks)
        least = math.ceil(vllm_needs(shape, work, spread, device_bytes) / device_bytes / STEP - 1e-9) * STEP
        share = round(max(least, min(s.vllm, largest_share(shape, work, spread, limit, device_bytes))), 2)
        if share < 1 and ranks > s.vllm_ranks:
            beside = "" if share == s.vllm else f" (and rollout.vllm.memory_fraction={share:g})"
            yield "rollout.vllm.tensor_parallel_size", f"{ranks}{beside}", {}, {"vllm": share, "vllm_ranks": ranks}
        elif share < 1 and share != s.vllm:
            yield "rollout.vllm.memory_fraction", f"{share:g}", {}, {"vllm": share}
        ranks *= 2


def _changes(work: Workload, s: Setting) -> Iterator[Change]:
    """Those that are not made yet, cheapest first."""
    if s.stage and s.bucket > REDUCE_BUCKET:
        bucket = "engine.deepspeed.zero_optimization.reduce_bucket_size"
        yield bucket, str(REDUCE_BUCKET), {}, {"bucket": REDUCE_BUCKET}
    if (s.vllm is None or s.on_cpu) and work.rows > 8:
        rows = max(8, work.rows // 2)
        yield "rollout.max_rows", str(rows), {"rows": rows}, {}
    longest = work.prompt + work.response
    if work.micro_batch > longest:
        yield "engine.micro_batch_tokens", str(longest), {"micro_batch": longest, "several": True}, {}
    if not s.checkpointing:
        yield "engine.activation_checkpointing", "true", {}, {"checkpointing": True}
    if s.dtype_bytes == FLOAT32 and not s.on_cpu:
        yield "engine.dtype", "bfloat16", {}, {"dtype_bytes": 2, "stage": max(s.stage, 2)}
    if s.head_budget > 256 << 20 and not s.on_cpu:
        yield "engine.head_budget_mib", "256", {}, {"head_budget": 256 << 20}
    # Transformers rollouts need whole parameters on every rank.
    stages = (2, 3) if s.vllm is not None else (2,)
    for stage in stages:
        if s.ranks > 1 and s.stage < stage:
            yield "engine.zero_stage", str(stage), {}, {"stage": stage}
    live = 100_000_000
    if s.stage == 3 and s.live > live:
        yield "engine.deepspeed.zero_optimization.stage3_max_live_parameters", str(live), {}, {"live": live}
    if not s.on_cpu and not s.offload_optimizer:
        stage = max(s.stage, 2)
        value = f"true (and engine.zero_stage={stage})"
        yield "engine.offload.optimizer", value, {}, {"offload_optimizer": True, "stage": stage}
    if not s.on_cpu and not s.offload_parameters and (s.ranks == 1 or 3 in stages):
        value = "true (and engine.zero_stage=3)"
        yield "engine.offload.parameters", value, {}, {"offload_parameters": True, "stage": 3}
    if s.lora_rank is None:
        yield "engine.lora.rank", "32", {}, {"lora_rank": 32}
