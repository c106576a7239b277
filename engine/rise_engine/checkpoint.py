"""Where a run's checkpoints live: written whole or not at all, the last k kept, the best model apart."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError

from .files import ASIDE, new_folder, recover
from .policy import PolicyEngine
from .state import CheckpointError, read_index, write_model

__all__ = ["CheckpointError", "CheckpointStore"]


class CheckpointStore:
    """`folder`/step-00000012/ for exact resume, `folder`/best/ a plain transformers folder with best.json in it.

    There is no pointer file to go stale: the latest checkpoint is the complete one of the highest step.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep: expected at least 1, found {keep}")
        self.folder = Path(folder)
        self.keep = keep

    def recover(self) -> None:
        """Cleans up after a process that died while saving. For the one process that writes here, before it does."""
        if _is_first():
            recover(self.folder)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        matches = (re.fullmatch(r"step-(\d+)", p.name) for p in self.folder.iterdir())
        return sorted(int(m[1]) for m in matches if m)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def latest(self) -> Path | None:
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def load_latest(self, policy: PolicyEngine) -> bool:
        """False if there is none. A damaged one raises CheckpointError: whether to fall back is the user's choice."""
        latest = self.latest()
        if latest is None:
            return False
        policy.load(latest)
        return True

    def save(self, policy: PolicyEngine) -> Path:
        """Collective. A step that has a whole checkpoint already is not saved again. Raises CheckpointError."""
        target = self.path(policy.step)
        if target.exists():
            read_index(target)
            return target
        with _saving(target, self.latest()) as aside:
            policy.save(aside)
        if _is_first():
            for step in self.steps()[: -self.keep]:
                shutil.rmtree(self.path(step), ignore_errors=True)
        return target

    def save_best(self, policy: PolicyEngine, record: Mapping[str, Any]) -> Path:
        """Collective. Replaces the best model; `record` says why it is the best."""
        target = self.folder / "best"
        with _saving(target, target if target.exists() else None) as aside:
            write_model(policy, aside)
            if _is_first():
                (aside / "best.json").write_text(json.dumps(dict(record), indent=1))
        return target

    def forget_best_after(self, step: int) -> None:
        """Removes a best model that a resumed run has not reached yet: it will come again, or a better one will."""
        best = self.best()
        if _is_first() and best is not None and best["step"] > step:
            shutil.rmtree(self.folder / "best")

    def best(self) -> dict[str, Any] | None:
        path = self.folder / "best" / "best.json"
        return json.loads(path.read_text()) if path.exists() else None


@contextmanager
def _saving(target: Path, standing: Path | None) -> Iterator[Path]:
    """`new_folder` for all ranks together; `standing` is what a failure leaves to go on from."""
    aside = target.with_name(ASIDE + target.name)
    made: AbstractContextManager[Path] = new_folder(target) if _is_first() else nullcontext(aside)
    try:
        with made:
            dist.barrier()  # the folder is there
            yield aside
            dist.barrier()  # everybody has written
    except (OSError, RuntimeError, SafetensorError) as error:
        left = f"{standing} is intact" if standing else "nothing was saved before it"
        raise CheckpointError(f"{target}: could not be saved: {error}; {left}") from error
    dist.barrier()


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
