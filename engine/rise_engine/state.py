"""What a checkpoint holds and how it is read back; `checkpoint.py` decides where it lies and for how long.

Every rank writes its own fragments of float32 master weights and Adam's moments (fragments.py) into safetensors files;
the index says which file holds which part of which parameter. So any number of ranks reads it back, under any ZeRO
stage, each only what it needs. Frozen parameters are those of the model the run started from and are not saved, but
the index has that model's fingerprint, so that no other takes its place.
"""

from __future__ import annotations

import hashlib
import json
import random
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import numpy
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from . import agreement
from .errors import EngineError
from .files import new_folder
from .fragments import MOMENTS, Fragment, adam, fragments, renew_weights, start_state, updates
from .loading import quiet
from .lora import merged

if TYPE_CHECKING:
    from .policy import PolicyEngine

INDEX = "checkpoint.json"
WEIGHT = "weight"
FILE_BYTES = 1 << 30
"""About how much of a rank's state is in host memory, and in one file, at a time."""


class CheckpointError(EngineError):
    """A checkpoint that cannot be written or used; the message says which and what to do."""


# --- saving ----------------------------------------------------------------------------------------------------------


def save(policy: PolicyEngine, folder: Path) -> None:
    """Collective. The index is written last and lists every file with its size."""
    parts = agreement.gather(_write_part, policy, folder)
    agreement.once(_write_index, policy, folder, parts)


def _write_part(policy: PolicyEngine, folder: Path) -> dict[str, Any]:
    """This rank's files; returns what the index says about each parameter in them."""
    torch.save(_rng_state(), folder / f"rng-{policy.rank:05d}.pt")
    optimizer = adam(policy)
    described: dict[str, Any] = {}
    waiting: dict[str, Tensor] = {}
    files = 0

    def flush() -> None:
        nonlocal files
        if waiting:
            save_file(waiting, _file(folder, policy.rank, files))
            waiting.clear()
            files += 1

    for fragment in (f.part(policy.rank, policy.world_size) for f in fragments(policy)):
        if fragment.n == 0:
            continue
        count = updates(optimizer, fragment.master)
        tensors = {WEIGHT: fragment.master} | {k: optimizer.state[fragment.master][k] for k in MOMENTS if count}
        for kind, flat in tensors.items():
            waiting[f"{kind}/{fragment.name}"] = fragment.of(flat).to("cpu", torch.float32, copy=True)
        described[fragment.name] = {
            "shape": fragment.shape,
            "updates": count,
            "part": [_file(folder, policy.rank, files).name, fragment.start, fragment.n],
        }
        if sum(t.nbytes for t in waiting.values()) >= FILE_BYTES:
            flush()
    flush()
    return described


def _file(folder: Path, rank: int, number: int) -> Path:
    return folder / f"rank-{rank:05d}-{number:03d}.safetensors"


def _write_index(policy: PolicyEngine, folder: Path, parts: list[dict[str, Any]]) -> None:
    parameters: dict[str, Any] = {}
    for described in parts:
        for name, found in described.items():
            entry = parameters.setdefault(name, {"shape": found["shape"], "updates": found["updates"], "parts": []})
            entry["parts"].append(found["part"])
    index = {
        "step": policy.step,
        "skipped": policy.skipped,
        "made_by": _identity(policy),
        "started_from": {"model": policy.source, "weights": policy.initial},
        "ranks": policy.world_size,
        "zero_stage": policy.engine.zero_optimization_stage(),
        "parameters": parameters,
        "files": {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1))


# --- loading ---------------------------------------------------------------------------------------------------------


def load(policy: PolicyEngine, folder: Path) -> None:
    """Collective. Weights, moments and counts; the random state too where the checkpoint has this rank's."""
    index = agreement.once(_read_ours, policy, folder)
    agreement.each(_read_part, policy, folder, index)
    renew_weights(policy)
    policy.step, policy.skipped = index["step"], index["skipped"]


def _read_ours(policy: PolicyEngine, folder: Path) -> dict[str, Any]:
    """The index; CheckpointError if it is not of a run that `policy` can go on with."""
    index = read_index(folder)
    mine = _identity(policy)
    for key, found in index["made_by"].items():
        if found != mine.get(key):
            raise CheckpointError(
                f"{folder}: saved with {key} {found}, but this run has {mine.get(key)}; "
                "resume with the configuration the run was started with"
            )
    began = index.get("started_from", {"weights": None})  # the first checkpoints did not say
    # A run that trains every weight and has no KL term needs nothing of the model it began with.
    if None not in (began["weights"], policy.initial) and began["weights"] != policy.initial:
        what = "KL reference" if policy.config.lora is None else "frozen base of the adapters"
        raise CheckpointError(
            f"{folder}: its {what} is {began['model']} with weights {began['weights']}, but this run has "
            f"{policy.source} with weights {policy.initial}; set model to the one the run was started with"
        )
    return index


def _read_part(policy: PolicyEngine, folder: Path, index: dict[str, Any]) -> None:
    optimizer, started = adam(policy), set()
    try:
        with _Reader(folder) as read:
            for fragment in fragments(policy):
                entry = index["parameters"][fragment.name]
                if id(fragment.master) not in started:
                    started.add(id(fragment.master))
                    start_state(optimizer, fragment.master, entry["updates"])
                read(fragment, WEIGHT, entry["parts"], fragment.of(fragment.master))
                for kind in MOMENTS if entry["updates"] else ():
                    read(fragment, kind, entry["parts"], fragment.of(optimizer.state[fragment.master][kind]))
        rng = folder / f"rng-{policy.rank:05d}.pt"
        if rng.exists():
            _set_rng_state(torch.load(rng, weights_only=True))
    except Exception as error:  # what safetensors and torch raise on damaged bytes depends on which bytes
        raise CheckpointError(f"{folder}: cannot be read: {type(error).__name__}: {error}") from error


class _Reader:
    """Copies stretches of saved parameters, opening each file once and reading no more of it than is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stack = ExitStack()
        self.files: dict[str, Any] = {}

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def __call__(self, fragment: Fragment, kind: str, parts: list[tuple[str, int, int]], into: Tensor) -> None:
        """`into` [fragment.n] from the saved parts (file, start, n). Raises ValueError if they do not cover it."""
        copied = 0
        for file, start, n in parts:
            begin, end = max(start, fragment.start), min(start + n, fragment.start + fragment.n)
            if begin < end:
                saved = self._open(file).get_slice(f"{kind}/{fragment.name}")[begin - start : end - start]
                into[begin - fragment.start : end - fragment.start].copy_(saved)
                copied += end - begin
        if copied != fragment.n:
            raise ValueError(f"{fragment.name}: {copied} of {fragment.n} values of its {kind} are there")

    def _open(self, file: str) -> Any:
        if file not in self.files:
            self.files[file] = self.stack.enter_context(safe_open(self.folder / file, framework="pt"))
        return self.files[file]


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


# --- exporting -------------------------------------------------------------------------------------------------------


def export(policy: PolicyEngine, folder: Path) -> None:
    """Collective; whole or not at all."""
    with ExitStack() as stack:
        aside = agreement.once(lambda: stack.enter_context(new_folder(folder)))
        write_model(policy, aside)
        agreement.once(stack.close)


def write_model(policy: PolicyEngine, folder: Path) -> None:
    """Collective: a transformers folder, written by rank 0. Under ZeRO-3 every rank holds the gathered weights for a
    moment.
    """
    with _gathered(policy):
        agreement.once(_write_model, policy, folder)


def _write_model(policy: PolicyEngine, folder: Path) -> None:
    with quiet():
        ours = policy.model.state_dict()
        places = {tensor.data_ptr() for tensor in ours.values()}
        # What is merged goes to host memory as it is made: together it would be a second copy on the GPU.
        weights = {n: t if t.data_ptr() in places else t.cpu() for n, t in merged(policy.model, ours.items())}
        policy.model.save_pretrained(folder, state_dict=weights)
    policy.tokenizer.save_pretrained(folder)


def _gathered(policy: PolicyEngine) -> AbstractContextManager:
    if policy.engine.zero_optimization_stage() < 3:
        return nullcontext()
    return deepspeed.zero.GatheredParameters(list(policy.model.parameters()))


def _identity(policy: PolicyEngine) -> dict[str, Any]:
    """What must be equal for a checkpoint to be this policy's."""
    names = [(n, *getattr(p, "ds_shape", p.shape)) for n, p in policy.model.named_parameters() if p.requires_grad]
    identity: dict[str, Any] = {
        "model": f"{type(policy.model).__name__} {hashlib.sha256(repr(names).encode()).hexdigest()[:12]}",
        "dtype": str(policy.config.torch_dtype).removeprefix("torch."),
    }
    if policy.config.lora is not None:  # the rank is in the shapes
        identity["engine.lora.alpha"] = policy.config.lora.alpha
    return identity


def _rng_state() -> dict[str, Any]:
    """Tensors and plain values, which are read back without running what a file says."""
    name, keys, *rest = numpy.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_rng_state(saved: dict[str, Any]) -> None:
    random.setstate(saved["python"])
    numpy.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if len(saved["cuda"]) == torch.cuda.device_count() > 0:
        torch.cuda.set_rng_state_all(saved["cuda"])
