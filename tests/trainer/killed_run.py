"""Runs `rise-rl train CONFIG ...` and kills itself with SIGKILL at a named moment: `python -m ... MOMENT STEP ARGS`.

Used by test_resume.py. Each moment is a place where a real kill would leave something half done.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from rise_engine import checkpoint, state
from rise_rl import run_folder
from rise_rl.cli import app
from rise_rl.run_folder import RunFolder


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(owner: Any, name: str, condition: Callable[..., bool]) -> None:
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if condition(*args, **kwargs):
            die()
        return result

    setattr(owner, name, patched)


def arm(moment: str, step: int) -> None:
    if moment == "rollouts-written":
        after(RunFolder, "write_rollouts", lambda _, s, __: s == step)
    elif moment == "evaluation-logged":
        after(RunFolder, "log_eval", lambda _, values: values["step"] == step)
    elif moment == "metrics-logged":
        after(RunFolder, "log_metrics", lambda _, values: values["step"] == step)
    elif moment == "half-a-line":
        original = run_folder.append_line

        def half(path, line):
            if path.name == "metrics.jsonl" and line.startswith(f'{{"step": {step},'):
                original(path, line[: len(line) // 2])
                die()
            original(path, line)

        run_folder.append_line = half
    elif moment == "inside-checkpoint":
        after(state, "save", lambda policy, _: policy.step == step)
    elif moment == "checkpoint-saved":
        after(checkpoint.CheckpointStore, "save", lambda _, policy: policy.step == step)
    else:
        raise SystemExit(f"no such moment: {moment}")


if __name__ == "__main__":
    if sys.argv[1] != "never":
        arm(sys.argv[1], int(sys.argv[2]))
    app(sys.argv[3:])
