"""The DeepSpeed configuration, built from the engine's own: what `--dry-run` shows and what `initialize` gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .config import EngineConfig

REDUCE_BUCKET = 50_000_000


def deepspeed_config(cfg: EngineConfig, world_size: int) -> dict[str, Any]:
    """The whole configuration for `world_size` ranks, `cfg.deepspeed` merged last.

    Gradient accumulation is the engine's own (k backward passes, one step), so DeepSpeed's batch sizes are all 1 and
    `managed_gradient_accumulation` is off: nothing is divided by the number of micro-batches. Gradients add up in
    float32 whatever the model's dtype. Learning rate and optimizer are the engine's too.
    """
    stage = cfg.effective_zero_stage
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        # overlap_comm needs a side stream, and stage 1 refuses it without DeepSpeed's own accumulation.
        zero |= {"overlap_comm": stage >= 2 and torch.cuda.is_available(), "contiguous_gradients": True}
        # A buffer of this many elements is held throughout the backward pass; DeepSpeed's own 500 million take a GiB.
        zero |= {"reduce_bucket_size": REDUCE_BUCKET}
    if cfg.offload.optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": cfg.offload.pin_memory}
    if cfg.offload.parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": cfg.offload.pin_memory}
    built = {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "steps_per_print": None,
        "gradient_clipping": cfg.clip_norm,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "bf16": {"enabled": cfg.torch_dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    return _merge(built, cfg.deepspeed)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
