"""The one way the trainer's weights reach vLLM: a transaction, after which it answers with them and nothing older.

vLLM's worker runs in this process, so tensors are handed over as they are. Written against vLLM 0.32.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import EngineError
from .weights_stream import named_weights

if TYPE_CHECKING:
    from vllm import LLM

    from .frozen import FrozenPolicy
    from .policy import PolicyEngine


FRACTION = "a smaller rollout.vllm.memory_fraction leaves the trainer more"


@dataclass(frozen=True)
class SyncReport:
    seconds: float
    bytes: int


class WeightSync:
    """Moves weights, and on a GPU decides who holds its memory: vLLM from a sync to `release`, the optimizer otherwise.

    version: the optimizer step whose weights vLLM holds; None while it holds none, which is so until the first sync,
    after `release` on a GPU, and after a sync that failed. It goes to vLLM's worker with the weights and is what the
    worker answers once it has read them all: no other way leads to a stamp.
    """

    def __init__(self, llm: LLM, policy: PolicyEngine | FrozenPolicy, *, sleep_level: int) -> None:
        self.llm, self.policy = llm, policy
        self.sleep_level = sleep_level if policy.device.type == "cuda" else 0
        self.asleep = False
        self.version: int | None = None

    def sync(self, version: int) -> SyncReport:
        """Collective. Raises RuntimeError while answers are being sampled (they would be of two policies) and for a
        version that is not the policy's step, EngineError if vLLM fails or did not take every weight.
        """
        started = time.perf_counter()
        if version != self.policy.step:
            raise RuntimeError(f"weight sync: asked to stamp step {version}, but the policy is at {self.policy.step}")
        if waiting := self.llm.llm_engine.get_num_unfinished_requests():
            raise RuntimeError(f"weight sync: {waiting} answers are still being sampled; finish or drop them first")
        self.version = None
        with self._phase("waking its weights", FRACTION):
            if self.sleep_level:
                offload_optimizer(self.policy)
                torch.cuda.empty_cache()  # what training has freed is not vLLM's before torch lets go of it
            if self.asleep:
                self.llm.wake_up(tags=["weights"])
        sent = _Counted(named_weights(self.policy))
        with self._phase("loading", FRACTION):
            [loaded] = self.llm.collective_rpc(load_weights, args=(sent, version))
        if not sent.whole:
            raise EngineError(f"weight sync: vLLM stopped reading after {sent.bytes} bytes of weights")
        if self.asleep:
            with self._phase("waking its cache", FRACTION):
                self.llm.wake_up(tags=["kv_cache"])
            self.asleep = self.llm.llm_engine.is_sleeping()  # vLLM only warns about a part that does not wake
            if self.asleep:
                raise EngineError("weight sync: vLLM is still asleep after weights and cache were woken")
        self.reset_cache()
        self.version = loaded
        return SyncReport(time.perf_counter() - started, sent.bytes)

    def reset_cache(self) -> None:
        """Forgets every cached prefix: keys and values of older weights are as wrong as the weights."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache, though no answer is being sampled")

    def release(self) -> None:
        """Gives the GPU to the optimizer until the next sync. On a CPU, or with sleep level 0, nothing happens."""
        if self.sleep_level and not self.asleep:
            self.version = None
            with self._phase("going to sleep", "rollout.vllm.sleep: 2 keeps no weights in host memory"):
                self.llm.sleep(level=self.sleep_level)
            self.asleep = True
        if self.sleep_level:
            with self._phase("giving the GPU back to the optimizer", "engine.offload.optimizer: true needs less of it"):
                reload_optimizer(self.policy)

    @contextmanager
    def _phase(self, name: str, remedy: str) -> Iterator[None]:
        """Whatever is raised in it becomes an EngineError that names it and, on a GPU, says what to change."""
        try:
            yield
        except EngineError:
            raise
        except Exception as error:
            found = f"weight sync at step {self.policy.step}: vLLM failed in {name}: {type(error).__name__}: {error}"
            raise EngineError(f"{found}. If memory ran out: {remedy}" if self.sleep_level else found) from error


class _Counted:
    """The stream of weights, how many bytes went through it, and whether it was read to its end."""

    def __init__(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.weights = weights
        self.bytes = 0
        self.whole = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights:
            self.bytes += tensor.numel() * tensor.element_size()
            yield name, tensor
        self.whole = True


# --- in vLLM's worker ------------------------------------------------------------------------------------------------


def load_weights(worker: Any, weights: Iterator[tuple[str, Tensor]], version: int) -> int:
    """Into the very tensors that the model (and its CUDA graphs) use, layer by layer. Returns `version` when all of
    them are renewed; EngineError names those that are not, about which vLLM only warns.
    """
    model = worker.model_runner.get_model()
    missing = {name for name, _ in model.named_parameters()}
    with watched_loading(model, missing), whole_layers(worker):
        worker.reload_weights(weights_iterator=weights)
    if missing:
        raise EngineError(
            f"weight sync: {len(missing)} of vLLM's weights are not among the trainer's and keep old values: "
            f"{', '.join(sorted(missing)[:4])}{', ...' if len(missing) > 4 else ''}"
        )
    refresh_tied_head(worker)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return version


@contextmanager
def whole_layers(worker: Any) -> Iterator[None]:
    """vLLM counts the weights of a layer until it is whole. A load that ends in between leaves its counts behind, and
    the next one would take a query that came twice for query, key and value: they are forgotten here.
    """
    try:
        yield
    except BaseException:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(worker.model_runner.get_model(), worker.model_config)
        raise


@contextmanager
def watched_loading(model: Any, missing: set[str]) -> Iterator[None]:
    """What the model's loader says it has loaded leaves `missing`; all of it for a loader that does not say."""
    load = model.load_weights

    def watched(weights: Iterator[tuple[str, Tensor]]) -> set[str] | None:
        names = load(weights)
        missing.difference_update(list(missing) if names is None else names)
        return names

    model.load_weights = watched
    try:
        yield
    finally:
        del model.load_weights


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
