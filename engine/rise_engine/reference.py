"""The frozen reference policy of the KL term: the model a run began with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
from torch import Tensor

from rise_kernels.token_losses import LossSpec

from . import agreement
from .config import EngineConfig
from .deepspeed_config import deepspeed_config
from .head import install_head
from .liger import apply_liger
from .loading import load_model
from .packing import HasTokens, choose_layout
from .policy import PolicyEngine, PolicyModule
from .scoring import token_logprobs


class FrozenReference:
    """The initial model beside the policy, in its dtype and on its kernels, without gradients or optimizer.

    model: the folder or hub id the policy was made from; never a checkpoint, also when a run is resumed. Under ZeRO-3
    its parameters are split over the ranks as the policy's are; under other stages every rank holds a whole copy.
    """

    def __init__(self, model: str | Path, policy: PolicyEngine) -> None:
        self.policy = policy
        frozen = agreement.each(load_model, model, dtype=policy.config.torch_dtype, attention="sdpa")
        self.layout = choose_layout(frozen, policy.config.attention)
        apply_liger(frozen, policy.config.liger)
        install_head(frozen, LossSpec(), policy.config.head_budget_mib)
        frozen.requires_grad_(requires_grad=False)
        self.module: Any = PolicyModule(frozen)
        if policy.engine.zero_optimization_stage() == 3:
            settings = _split(policy.config, policy.world_size)
            self.module = deepspeed.initialize(model=self.module, config=settings, dist_init_required=False)[0].module
        self.module.to(policy.device).eval()

    def score(self, sequences: Sequence[HasTokens], *, temperature: float) -> list[Tensor]:
        """As PolicyEngine.score. Collective."""
        policy = self.policy
        agreement.each(policy.check_tokens, sequences)
        return token_logprobs(
            self.module,
            sequences,
            temperature=temperature,
            budget=policy.config.micro_batch_tokens,
            layout=self.layout,
            pad_id=policy.pad_id,
            device=policy.device,
        )


class AdapterReference:
    """The reference of a LoRA run: the policy's own base model, adapters switched off. No memory of its own."""

    def __init__(self, policy: PolicyEngine) -> None:
        self.policy = policy

    def score(self, sequences: Sequence[HasTokens], *, temperature: float) -> list[Tensor]:
        with self.policy.without_adapters():
            return self.policy.score(sequences, temperature=temperature)


def reference_of(model: str | Path, policy: PolicyEngine) -> FrozenReference | AdapterReference:
    """The reference that the policy's kind of training asks for. Raises OSError where the model cannot be loaded."""
    return FrozenReference(model, policy) if policy.config.lora is None else AdapterReference(policy)


def _split(config: EngineConfig, world_size: int) -> dict[str, Any]:
    """The policy's DeepSpeed settings, as far as they say how parameters are held."""
    built = deepspeed_config(config, world_size)
    zero = {key: value for key, value in built["zero_optimization"].items() if key in ("stage", "offload_param")}
    return {key: built[key] for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "bf16")} | {
        "zero_optimization": zero
    }
