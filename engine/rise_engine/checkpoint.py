"""Where a run's checkpoints live: written whole or not at all, the last k kept, the best model apart."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from . import agreement
from .files import new_folder, recover
from .policy import PolicyEngine
from .state import CheckpointError, read_index, write_model

__all__ = ["CheckpointError", "CheckpointStore"]


class CheckpointStore:
    """`folder`/step-00000012/ for exact resume, `folder`/best/ a plain transformers folder with best.json in it.

    There is no pointer file to go stale: the latest checkpoint is the complete one of the highest step. A new best
    model is `folder`/best-ahead/ until a checkpoint is saved: a run that dies before that goes back to the last
    checkpoint, and to the best model of then.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep: expected at least 1, found {keep}")
        self.folder = Path(folder)
        self.keep = keep

    def recover(self) -> None:
        """Cleans up after a process that died while saving. For the one process that writes here, before it does."""
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
        """Collective. False if there is none. A damaged one raises CheckpointError: whether to fall back is the user's
        choice.
        """
        latest = agreement.once(self.latest)
        if latest is None:
            return False
        policy.load(latest)
        return True

    def save(self, policy: PolicyEngine) -> Path:
        """Collective. A step that has a whole checkpoint already is not saved again. Raises CheckpointError."""
        target = self.path(policy.step)
        if agreement.once(target.exists):
            agreement.once(read_index, target)
        else:
            _save(target, self.latest, policy.save)
            agreement.once(self._retire)
        agreement.once(self._settle_best)
        return target

    def _retire(self) -> None:
        for step in self.steps()[: -self.keep]:
            shutil.rmtree(self.path(step), ignore_errors=True)

    def save_best(self, policy: PolicyEngine, record: Mapping[str, Any]) -> Path:
        """Collective. Replaces the best model; `record` says why it is the best, and its `step`."""
        target = self.folder / "best-ahead"

        def write(folder: Path) -> None:
            write_model(policy, folder)
            agreement.once((folder / "best.json").write_text, json.dumps(dict(record), indent=1))

        _save(target, lambda: found if (found := self.best_folder()).exists() else None, write)
        return target

    def forget_best_after(self, step: int) -> None:
        """Back to the best model of the checkpoint that a run resumes from. Removes one that it has not reached yet: it
        will come again, or a better one will.
        """
        best = self.best()
        if best is not None and best["step"] > step:
            shutil.rmtree(self.best_folder())
        self._settle_best()

    def best(self) -> dict[str, Any] | None:
        path = self.best_folder() / "best.json"
        return json.loads(path.read_text()) if path.exists() else None

    def best_folder(self) -> Path:
        ahead = self.folder / "best-ahead"
        return ahead if ahead.exists() else self.folder / "best"

    def _settle_best(self) -> None:
        """After a kill in between, `best_folder` is still the new one."""
        ahead = self.folder / "best-ahead"
        if ahead.exists():
            shutil.rmtree(self.folder / "best", ignore_errors=True)
            ahead.rename(self.folder / "best")


def _save(target: Path, standing: Callable[[], Path | None], write: Callable[[Path], None]) -> None:
    """`write`, which is collective, into a folder that takes `target`'s place once every rank is done. Any rank's
    failure is every rank's, and leaves what was `standing`.
    """
    try:
        with ExitStack() as stack:
            aside = agreement.once(lambda: stack.enter_context(new_folder(target)))
            write(aside)
            agreement.once(stack.close)
    except (OSError, RuntimeError, SafetensorError) as error:
        stands = standing()
        left = f"{stands} is intact" if stands else "nothing was saved before it"
        raise agreement.instead(error, CheckpointError(f"{target}: could not be saved: {error}; {left}")) from error
