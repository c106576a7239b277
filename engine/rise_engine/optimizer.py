"""AdamW, and a learning rate that is a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from .config import EngineConfig
from .errors import EngineError


class NonFiniteError(EngineError):
    """A loss or a gradient norm is NaN or infinite. Raised before the optimizer step, so nothing was updated."""


def build_optimizer(model: nn.Module, cfg: EngineConfig) -> torch.optim.Optimizer:
    """Decoupled weight decay on matrices; none on norms and biases. torch's fused AdamW needs no compiler."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if cfg.offload.optimizer:
        from deepspeed.ops import adam

        try:
            return adam.DeepSpeedCPUAdam(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, adamw_mode=True)
        except Exception as error:  # what a failed build raises depends on which tool is missing
            raise EngineError(
                "engine.offload.optimizer: DeepSpeed could not build its CPU Adam, which takes a C++ compiler, ninja "
                f"and a few minutes the first time: {error}"
            ) from error
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=True)


def learning_rate(cfg: EngineConfig, step: int) -> float:
    """The rate of step `step` (counted from 0): lr (step + 1) / warmup_steps during warm-up, then lr."""
    return cfg.lr * min(1.0, (step + 1) / cfg.warmup_steps) if cfg.warmup_steps else cfg.lr


def clip_before_step(optimizer: torch.optim.Optimizer, max_norm: float) -> Callable[[], float]:
    """For ZeRO stage 0, where DeepSpeed neither reports the norm nor stops at NaN: clip just before the update.

    By then gradients are reduced over ranks. Returns a function that gives the last norm before clipping.
    The hook raises NonFiniteError, and the optimizer then does nothing.
    """
    last = [0.0]

    def hook(*_: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        last[0] = norm.item()
        if not math.isfinite(last[0]):
            raise NonFiniteError(f"gradient norm is {last[0]}")
        if max_norm > 0:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)

    optimizer.register_step_pre_hook(hook)
    return lambda: last[0]
