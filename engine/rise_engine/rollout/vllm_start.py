"""Starting vLLM inside the trainer's process, and leaving that process as it was."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy
import torch

from ..agreement import world_size
from ..loading import quiet
from .vllm_config import VllmConfig

if TYPE_CHECKING:
    from vllm import LLM

    from ..frozen import FrozenPolicy
    from ..policy import PolicyEngine

CPU_BLOCK = 32
"""Tokens of a cache block on a CPU (its kernels want a multiple of 32): the smaller, the more of a prompt is shared."""

VERSION = "0.32"
"""weight_sync.py, vllm.py and this file follow its source, and use parts of it that are not its public interface."""

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""Always 0: the engine lives in this process, where its worker reads the trainer's tensors directly."""

SETTINGS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's attention on a CPU is compiled for. Known here, so that a model it cannot serve costs no import."""


def installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def why_not(policy: PolicyEngine | FrozenPolicy) -> str | None:
    """What keeps vLLM from serving the policy's model on this machine; None if nothing does."""
    if not installed():
        return "vLLM is not installed"
    width = head_dim(policy)
    if policy.device.type == "cpu" and width not in CPU_HEAD_DIMS:
        return f"vLLM on a CPU has no attention for the model's head_dim {width} (it has {CPU_HEAD_DIMS})"
    try:
        with imported() as vllm:
            if not vllm.__version__.startswith(f"{VERSION}."):
                return f"vLLM {vllm.__version__} is installed, and {VERSION} is what its weights are renewed in"
            supported = vllm.ModelRegistry.get_supported_archs()
    except ImportError as error:
        return f"vLLM cannot be imported ({error})"
    named = policy.model.config.architectures or [type(policy.model).__name__]
    if not set(named) & set(supported):
        return f"vLLM has no model of the kind {', '.join(named)}"
    return None


def version() -> str:
    with imported() as vllm:
        return vllm.__version__


@contextmanager
def imported() -> Iterator[Any]:
    """The vllm package, quiet and with this process left as it was."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ[IN_PROCESS] = "0"
    with undisturbed(), silenced(), quiet():
        import vllm

        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # it may have been imported before
        yield vllm


def start(
    policy: PolicyEngine | FrozenPolicy, *, context_length: int, max_rows: int, subset: bool, config: VllmConfig
) -> LLM:
    """A vLLM engine for the policy's model with weights made up: nothing of it is true before the first sync, so that a
    tensor that a sync does not reach cannot be right by luck.

    Collective: all ranks start together. Seconds on a CPU, a minute or more on a GPU (kernels, CUDA graphs).
    """
    settings = arguments(policy, context_length=context_length, max_rows=max_rows, subset=subset, config=config)
    if policy.device.type == "cuda":  # for as long as kernels are compiled, so outside what is put back
        os.environ.setdefault("TRITON_PRINT_AUTOTUNING", "0")  # vLLM would have the trainer's kernels print theirs
        if settings["dtype"] == "float32":
            os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # vLLM's attention in Triton would multiply in TF32
    with imported() as vllm:
        if policy.device.type == "cpu" and config.tensor_parallel_size > 1:
            keep_to_process_groups()
        if policy.device.type == "cuda":  # vLLM reads its GPU from there, and not every launcher sets it
            os.environ["LOCAL_RANK"] = str(policy.device.index or 0)
        try:
            llm = vllm.LLM(**settings)
        except (ValueError, RuntimeError, AssertionError) as error:  # torch.OutOfMemoryError is a RuntimeError
            share = f"; gpu_memory_utilization is rollout.vllm.memory_fraction, {config.memory_fraction}, here"
            reason = error if isinstance(error, ValueError) else repr(error)
            raise ValueError(f"vLLM does not start: {reason}{share if policy.device.type == 'cuda' else ''}") from error
    # vLLM's own clean-up also destroys the default process group, which is the trainer's.
    client = llm.llm_engine.engine_core
    client._finalizer.detach()
    weakref.finalize(llm, close, client.engine_core)
    return llm


def keep_to_process_groups() -> None:
    """Ranks that hold one model together talk through torch.distributed. The memory that vLLM would share between them
    on a CPU has, under an external launcher, one name for the whole machine: a second run would fail on it, or join in.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def close(core: Any) -> None:
    """Gives back what an engine that nobody holds any longer has taken."""
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()


def arguments(
    policy: PolicyEngine | FrozenPolicy, *, context_length: int, max_rows: int, subset: bool, config: VllmConfig
) -> dict[str, Any]:
    """What vLLM is started with. subset: log-probs before top-p and top-k (tempering.py then adds the temperature)."""
    on_gpu = policy.device.type == "cuda"
    chosen: dict[str, Any] = {
        "model": policy.model.name_or_path,
        "dtype": str(policy.model.dtype).removeprefix("torch."),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # stop tokens and sampling are ours alone
        "max_model_len": context_length,
        "max_num_seqs": max_rows,
        "enable_prefix_caching": True,
        "logprobs_mode": "raw_logprobs" if subset else "processed_logprobs",
        "tensor_parallel_size": config.tensor_parallel_size,
        "seed": 0,  # every request brings its own
    }
    if world_size() > 1:
        chosen["distributed_executor_backend"] = "external_launcher"
    if on_gpu:
        chosen |= {"gpu_memory_utilization": config.memory_fraction, "enable_sleep_mode": config.sleep > 0}
        chosen["hf_overrides"] = {"head_dtype": "float32"}  # as the trainer's head; the product alone, not the weight
    else:
        chosen |= {"enforce_eager": True, "block_size": CPU_BLOCK}
        chosen["kv_cache_memory_bytes"] = cache_bytes(policy, context_length, max_rows, config.tensor_parallel_size)
    return chosen


def cache_bytes(policy: PolicyEngine | FrozenPolicy, context_length: int, max_rows: int, ranks: int) -> int:
    """One rank's part of the keys and values of `max_rows` answers of full length, none of them shared."""
    shape = policy.model.config.get_text_config()
    heads = max(1, (getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads) // ranks)
    tokens = (max_rows + 1) * -(-context_length // CPU_BLOCK) * CPU_BLOCK
    return 2 * shape.num_hidden_layers * heads * head_dim(policy) * policy.model.dtype.itemsize * tokens


def head_dim(policy: PolicyEngine | FrozenPolicy) -> int:
    shape = policy.model.config.get_text_config()
    return int(getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads)


@contextmanager
def silenced() -> Iterator[None]:
    """Keeps what libraries write past Python (C++ warnings) off the console while vLLM starts; shown if it fails."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        try:
            yield
        except BaseException:
            aside.seek(0)
            os.write(kept, aside.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Random states, environment, signal handlers and torch's switches are afterwards what they were: vLLM seeds every
    generator, sets LD_PRELOAD and LOCAL_WORLD_SIZE for processes it might start, and changes torch's number of threads
    and the function that sets it.
    """
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    environment = dict(os.environ)
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if main else {}
    set_threads, threads, precision, dtype = (
        torch.set_num_threads,
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
    )
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        for name in set(os.environ) - set(environment):
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:  # on a GPU vLLM goes down to one, and Adam on the CPU would with it
            torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)
