"""The engine's typed configuration. Every key is explained here; unknown keys are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

Beta = Annotated[float, Field(ge=0, lt=1)]


class OffloadConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    optimizer: bool = Field(
        False, description="Keep the optimizer's state in host memory (ZeRO 1-3, DeepSpeedCPUAdam)."
    )
    parameters: bool = Field(
        default=False, description="Keep the parameters in host memory between uses (ZeRO 3 only)."
    )
    pin_memory: bool = Field(
        default=True, description="Page-lock the offloaded buffers: faster copies, memory not swappable."
    )


class LoraSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    rank: int = Field(32, gt=0, description="Rank of the two factors.")
    alpha: int = Field(64, gt=0, description="The product of the factors is scaled by alpha / rank.")
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description="Names of the linear layers that get an adapter (q_proj, for one). all-linear: every linear layer "
        "but the head, which is never adapted.",
    )


class EngineConfig(BaseModel):
    """How the policy is held, trained and split. Only the optimizer's keys and `lora` change what is computed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Type of the forward and backward pass. auto: bfloat16 on a GPU, float32 on a CPU. Master weights, "
        "gradient accumulation and optimizer state are float32 either way.",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        0,
        description="DeepSpeed ZeRO stage: 0 nothing is split, 1 optimizer state, 2 and gradients, 3 and parameters. "
        "In bfloat16, 0 and 1 run as 2: DeepSpeed's stage 0 cannot add up bfloat16 gradients in float32 (and its Adam "
        "begins with a step of zero gradient), and in its stage 1 every rank holds all of the float32 gradient.",
    )
    lr: float = Field(1e-6, ge=0, description="Learning rate after warm-up; constant from there.")
    warmup_steps: int = Field(
        10, ge=0, description="Optimizer updates over which the rate rises linearly from lr/warmup_steps."
    )
    weight_decay: float = Field(0.1, ge=0, description="AdamW's decoupled weight decay; norms and biases have none.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="AdamW's betas.")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    clip_norm: float = Field(1.0, ge=0, description="Global gradient norm above which gradients are scaled; 0: never.")
    activation_checkpointing: bool = Field(
        False, description="Recompute each layer in the backward pass: less memory, about a third more time."
    )
    micro_batch_tokens: int = Field(
        4096,
        gt=0,
        description="Budget of tokens per forward pass, shared prompts counted once and padding counted. A longer "
        "sequence gets a micro-batch of its own.",
    )
    head_budget_mib: int = Field(
        512, gt=0, description="Temporary memory of the fused head (log-probs and losses) in MiB."
    )
    attention: Literal["auto", "sdpa", "flash_attention_2", "eager"] = Field(
        "auto",
        description="Attention implementation. auto: flash-attn where it is installed and can run (CUDA, bfloat16), "
        "else PyTorch's sdpa. With either, responses are packed behind their shared prompt, without padding, where the "
        "model's attention allows it.",
    )
    timeout_minutes: float = Field(
        30,
        gt=0,
        description="How long a rank waits for the others before it gives up. The longest wait is for the rank whose "
        "answers and grades take longest.",
    )
    liger: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Liger-Kernel's RMSNorm, RoPE and SwiGLU. auto: on a GPU, where it is installed and knows the "
        "model.",
    )
    offload: OffloadConfig = Field(OffloadConfig(), description="What lives in host memory.")
    lora: LoraSettings | None = Field(
        None,
        description="Train low-rank adapters (peft) and keep the model frozen; exports have them merged. null: train "
        "every weight.",
    )
    deepspeed: dict[str, Any] = Field(
        default_factory=dict,
        description="Raw DeepSpeed settings, merged last over the built ones (see --dry-run).",
    )

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        if self.offload.parameters and self.zero_stage != 3:
            raise ValueError(f"offload.parameters needs zero_stage 3, found zero_stage {self.zero_stage}")
        if self.offload.optimizer and self.zero_stage == 0:
            raise ValueError("offload.optimizer needs zero_stage 1, 2 or 3, found zero_stage 0")
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype == "auto":
            return torch.bfloat16 if torch.cuda.is_available() else torch.float32
        return getattr(torch, self.dtype)

    @property
    def effective_zero_stage(self) -> int:
        """The stage that runs: at least 2 in bfloat16 (see `zero_stage`)."""
        return max(self.zero_stage, 2) if self.torch_dtype == torch.bfloat16 else self.zero_stage
