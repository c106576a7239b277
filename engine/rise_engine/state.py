"""What a checkpoint holds and how it is read back; `checkpoint.py` decides where it lies and for how long."""

from __future__ import annotations

import hashlib
import json
import random
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import numpy
import torch
import torch.distributed as dist

from .errors import EngineError
from .files import new_folder
from .loading import quiet
from .lora import merged

if TYPE_CHECKING:
    from .policy import PolicyEngine

TAG = "deepspeed"
INDEX = "checkpoint.json"


class CheckpointError(EngineError):
    """A checkpoint that cannot be written or used; the message says which and what to do."""


def save(policy: PolicyEngine, folder: Path) -> None:
    """Collective. The index is written last and lists every file with its size."""
    policy.engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
    torch.save(_rng_state(), folder / f"rng_rank{policy.rank}.pt")
    dist.barrier()
    if policy.rank == 0:
        files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
        index = {"step": policy.step, "skipped": policy.skipped, "made_by": _identity(policy), "files": files}
        (folder / INDEX).write_text(json.dumps(index, indent=1))
    dist.barrier()


def load(policy: PolicyEngine, folder: Path) -> None:
    index = read_index(folder)
    mine = _identity(policy)
    for key, found in index["made_by"].items():
        if found != mine[key]:
            raise CheckpointError(
                f"{folder}: saved with {key} {found}, but this run has {mine[key]}; "
                "resume with the configuration the run was started with"
            )
    try:
        path, _ = policy.engine.load_checkpoint(str(folder), tag=TAG)
        rng = torch.load(folder / f"rng_rank{policy.rank}.pt", weights_only=False)
    except Exception as error:  # what torch.load raises on damaged bytes depends on which bytes
        raise CheckpointError(f"{folder}: cannot be read: {error}") from error
    if path is None:
        raise CheckpointError(f"{folder}: DeepSpeed found nothing to load")
    policy.step, policy.skipped = index["step"], index["skipped"]
    _set_rng_state(rng)


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a checkpoint whose files are all there and whole in size; CheckpointError otherwise."""
    try:
        index = json.loads((folder / INDEX).read_text())
        files, _ = index["files"], index["step"]
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: not a checkpoint, it has no {INDEX}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: its {INDEX} cannot be read ({error})") from error
    for name, size in files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise CheckpointError(
                f"{folder}: {name} {what}; remove this folder to resume from the checkpoint before it"
            )
    return index


def export(policy: PolicyEngine, folder: Path) -> None:
    """Collective; whole or not at all."""
    made: AbstractContextManager[Path] = new_folder(folder) if policy.rank == 0 else nullcontext(folder)
    with made as aside:
        write_model(policy, aside)
    dist.barrier()


def write_model(policy: PolicyEngine, folder: Path) -> None:
    """A transformers folder, by rank 0. Under ZeRO-3 every rank holds the gathered weights for a moment."""
    with _gathered(policy):
        if policy.rank == 0:
            with quiet():
                weights = dict(merged(policy.model, policy.model.state_dict().items()))
                policy.model.save_pretrained(folder, state_dict=weights)
            policy.tokenizer.save_pretrained(folder)


def _gathered(policy: PolicyEngine) -> AbstractContextManager:
    if policy.engine.zero_optimization_stage() < 3:
        return nullcontext()
    return deepspeed.zero.GatheredParameters(list(policy.model.parameters()))


def _identity(policy: PolicyEngine) -> dict[str, Any]:
    """What must be equal for DeepSpeed to read a checkpoint back."""
    names = [(n, *getattr(p, "ds_shape", p.shape)) for n, p in policy.model.named_parameters()]
    return {
        "model": f"{type(policy.model).__name__} {hashlib.sha256(repr(names).encode()).hexdigest()[:12]}",
        "dtype": str(policy.config.torch_dtype).removeprefix("torch."),
        "zero_stage": policy.engine.zero_optimization_stage(),
        "ranks": policy.world_size,
    }


def _rng_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_rng_state(saved: dict[str, Any]) -> None:
    random.setstate(saved["python"])
    numpy.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if saved["cuda"]:
        torch.cuda.set_rng_state_all(saved["cuda"])
