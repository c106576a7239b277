"""Liger-Kernel's RMSNorm, RoPE and SwiGLU for the backbone. Its fused cross-entropy is never used: the head is ours."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch
from transformers import PreTrainedModel


def apply_liger(model: PreTrainedModel, wanted: Literal["auto", "on", "off"]) -> bool:
    """Swaps the kernels in where they can run; returns whether it did. `model`'s norms and MLPs change in place; Liger
    replaces the rotary embedding for every model of this architecture in the process.

    Raises ValueError, with the reason, if they are `on` and cannot be had.
    """
    why = why_not_liger(model)
    if wanted == "on" and why is not None:
        raise ValueError(f"engine.liger: on, but {why}")
    if wanted == "off" or why is not None:
        return False
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(
        model, rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
    )
    return True


def why_not_liger(model: PreTrainedModel) -> str | None:
    """None if Liger has kernels for this model that can run here."""
    if not torch.cuda.is_available():
        return "Liger's kernels run on GPUs only, and this machine has none"
    if find_spec("liger_kernel") is None:
        return "the package liger-kernel is not installed"
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"Liger has no kernels for models of type {model.config.model_type}"
    return None
