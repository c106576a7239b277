"""The one way the trainer's weights reach vLLM: a transaction, after which it answers with them and nothing older.

vLLM's worker runs in this process, so tensors are handed over as they are. Written against vLLM 0.32.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .weights_stream import named_weights

if TYPE_CHECKING:
    from vllm import LLM

    from .frozen import FrozenPolicy
    from .policy import PolicyEngine


@dataclass(frozen=True)
class SyncReport:
    seconds: float
    bytes: int


class WeightSync:
    """Moves weights, and on a GPU decides who holds its memory: vLLM from a sync to `release`, the optimizer otherwise.

    version: the optimizer step whose weights vLLM holds; None while it holds none, which is so until the first sync,
    after `release` on a GPU, and after a sync that failed.
    """

    def __init__(self, llm: LLM, policy: PolicyEngine | FrozenPolicy, *, sleep_level: int) -> None:
        self.llm, self.policy = llm, policy
        self.sleep_level = sleep_level if policy.device.type == "cuda" else 0
        self.asleep = False
        self.version: int | None = None

    def sync(self, version: int) -> SyncReport:
        """Collective. Raises RuntimeError while answers are being sampled: they would be of two policies."""
        started = time.perf_counter()
        if waiting := self.llm.llm_engine.get_num_unfinished_requests():
            raise RuntimeError(f"weight sync: {waiting} answers are still being sampled; finish or drop them first")
        self.version = None
        if self.sleep_level:
            offload_optimizer(self.policy)
            torch.cuda.empty_cache()  # what training has freed is not vLLM's before torch lets go of it
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        sent = _Counted(named_weights(self.policy))
        self.llm.collective_rpc(load_weights, args=(sent,))
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        self.reset_cache()
        self.version = version
        return SyncReport(time.perf_counter() - started, sent.bytes)

    def reset_cache(self) -> None:
        """Forgets every cached prefix: keys and values of older weights are as wrong as the weights."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache, though no answer is being sampled")

    def release(self) -> None:
        """Gives the GPU to the optimizer until the next sync. On a CPU, or with sleep level 0, nothing happens."""
        if self.sleep_level and not self.asleep:
            self.version = None
            self.llm.sleep(level=self.sleep_level)
            self.asleep = True
        if self.sleep_level:
            reload_optimizer(self.policy)


class _Counted:
    """The stream of weights, and how many bytes went through it."""

    def __init__(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.weights = weights
        self.bytes = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights:
            self.bytes += tensor.numel() * tensor.element_size()
            yield name, tensor


# --- in vLLM's worker ------------------------------------------------------------------------------------------------


def load_weights(worker: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Into the very tensors that the model (and its CUDA graphs) use, layer by layer."""
    worker.reload_weights(weights_iterator=weights)
    refresh_tied_head(worker)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def refresh_tied_head(worker: Any) -> None:
    """On a CPU vLLM multiplies by a packed copy of the head's weight. Loading the head renews it, but the loaders of
    some models skip a tied head, whose copy would then stay as it was.
    """
    head = getattr(worker.model_runner.get_model(), "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


# --- the optimizer's state -------------------------------------------------------------------------------------------


def offload_optimizer(policy: PolicyEngine | FrozenPolicy) -> None:
    """Adam's moments wait in host memory while vLLM holds the GPU: two thirds of what the optimizer needs. The float32
    master weights stay, so that a checkpoint can be saved meanwhile.
    """
    if (optimizer := _movable(policy)) is not None:
        from deepspeed.runtime.zero.offload_states import offload_optimizer_states

        _unlink_moments(policy)
        offload_optimizer_states(optimizer, "cpu", pin_memory=policy.device.type == "cuda")
        torch.cuda.synchronize()


def reload_optimizer(policy: PolicyEngine | FrozenPolicy) -> None:
    if (optimizer := _movable(policy)) is not None:
        from deepspeed.runtime.zero.offload_states import reload_optimizer_states

        waiting = reload_optimizer_states(optimizer, policy.device)
        torch.cuda.synchronize()
        del waiting  # the copies read from it until here


def _unlink_moments(policy: PolicyEngine | FrozenPolicy) -> None:
    """Under ZeRO 1 and 2 DeepSpeed gives every parameter views of its moments at a step: they would keep on the GPU
    what has gone to host memory, for good. The next step makes them anew.
    """
    outer = policy.engine.optimizer  # type: ignore[union-attr]
    if getattr(outer, "_hp_optimizer_states_linked", False):
        for parameter in policy.model.parameters():
            if getattr(parameter, "_hp_mapping", None) is not None:
                parameter._hp_mapping.optim_fragment = None
        outer._hp_optimizer_states_linked = False


def _movable(policy: PolicyEngine | FrozenPolicy) -> torch.optim.Optimizer | None:
    """torch's optimizer inside DeepSpeed's; None where there is none or its state lives in host memory anyway."""
    from .policy import PolicyEngine

    if not isinstance(policy, PolicyEngine) or policy.config.offload.optimizer:
        return None
    outer = policy.engine.optimizer
    return getattr(outer, "optimizer", outer)
