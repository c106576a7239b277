"""What to change in a configuration whose memory plan does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .memory_plan import FLOAT32, ModelShape, Setting, Workload, plan_memory


@dataclass(frozen=True)
class Advice:
    """One change: key=value, and the peak once it and those before it are made."""

    key: str
    value: str
    saves: float
    peak: float


def advise(shape: ModelShape, work: Workload, setting: Setting, limit: float, device_bytes: int = 0) -> list[Advice]:
    """Changes until the peak is within `limit` bytes: each is the one that costs least among those that save at least
    1 % after the earlier ones. The list may end before it fits: then only more ranks or memory help.
    """
    made: list[Advice] = []
    peak = plan_memory(shape, work, setting, device_bytes).peak
    while peak > limit:
        for key, value, new_work, new_setting in _changes(work, setting):
            changed = replace(work, **new_work), replace(setting, **new_setting)
            new = plan_memory(shape, *changed, device_bytes).peak
            if new <= 0.99 * peak:
                made.append(Advice(key, value, peak - new, new))
                peak, (work, setting) = new, changed
                break
        else:
            break
    return made


def _changes(work: Workload, s: Setting) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """(key, value, fields of Workload, fields of Setting) that are not made yet: cheapest first."""
    bucket = "engine.deepspeed.zero_optimization.reduce_bucket_size"
    if s.stage and s.bucket > 50_000_000:
        yield bucket, "50000000", {}, {"bucket": 50_000_000}
    if s.vllm is None and work.rows > 8:
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
    for stage in (2, 3):
        if s.ranks > 1 and s.stage < stage:
            smaller = min(s.bucket, 50_000_000)
            yield "engine.zero_stage", f"{stage} (and {bucket}=50000000)", {}, {"stage": stage, "bucket": smaller}
    live = 100_000_000
    if s.stage == 3 and s.live > live:
        yield "engine.deepspeed.zero_optimization.stage3_max_live_parameters", str(live), {}, {"live": live}
    if not s.on_cpu and not s.offload_optimizer:
        stage = max(s.stage, 2)
        value = f"true (and engine.zero_stage={stage})"
        yield "engine.offload.optimizer", value, {}, {"offload_optimizer": True, "stage": stage}
    if not s.on_cpu and not s.offload_parameters:
        value = "true (and engine.zero_stage=3)"
        yield "engine.offload.parameters", value, {}, {"offload_parameters": True, "stage": 3}
    if s.lora_rank is None:
        yield "engine.lora.rank", "32", {}, {"lora_rank": 32}
