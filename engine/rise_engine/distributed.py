"""Process groups: whatever launcher started us, or one process alone."""

from __future__ import annotations

import os
import random
import warnings
from datetime import timedelta
from importlib import import_module

import torch
import torch.distributed as dist

from .errors import EngineError

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_distributed(timeout: timedelta = timedelta(minutes=30)) -> tuple[int, int, torch.device]:
    """Starts torch.distributed and DeepSpeed's communication once; returns (rank, world size, device).

    Under a launcher (torchrun, deepspeed, Slurm with its variables exported) the environment decides. Otherwise this
    is a group of one that meets itself in memory, so that no port is needed and runs cannot collide.
    Raises EngineError when a launcher set only some of its variables.
    """
    present = [name for name in LAUNCHER_VARIABLES if name in os.environ]
    cuda = torch.cuda.is_available()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if len(present) == len(LAUNCHER_VARIABLES):
            if cuda:
                torch.cuda.set_device(local_rank())
            dist.init_process_group(backend, timeout=timeout)
        elif {"RANK", "WORLD_SIZE"} & set(present):
            missing = sorted(set(LAUNCHER_VARIABLES) - set(present))
            raise EngineError(
                f"distributed launch: {', '.join(present)} set but {', '.join(missing)} missing; "
                "start with torchrun or deepspeed, or unset them to run as one process"
            )
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    _init_deepspeed_comm()
    device = torch.device("cuda", local_rank()) if cuda else torch.device("cpu")
    return dist.get_rank(), dist.get_world_size(), device


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def _init_deepspeed_comm() -> None:
    import deepspeed

    # On a CPU, DeepSpeed would compile a shared-memory all-reduce first (a minute, after probing every other op), for
    # `inference_all_reduce` alone. None is its own answer where the op cannot be had: gloo does everything.
    # (By name: the attribute `deepspeed.comm.torch` is torch itself.)
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    # DeepSpeed still calls collectives by names that torch is about to rename; it says so on every call.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # DeepSpeed reads this even though the group exists already.
    os.environ.setdefault("LOCAL_RANK", str(local_rank()))
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def seed_everything(seed: int) -> None:
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def all_ranks_max(value: float, device: torch.device) -> float:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def all_ranks_sum(values: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values
