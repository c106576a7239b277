"""Runs `rise-rl ARGS` with something going wrong on one rank, for test_several_ranks.py:

torchrun ... -m tests.trainer.faulty_rank MOMENT RANK STEP ARGS
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from rise_engine import state
from rise_engine.policy import PolicyEngine
from rise_rl import cli
from rise_rl.graders.routing import RoutingGrader
from rise_rl.step_sampler import StepSampler


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def out_of_memory(*_: Any, **__: Any) -> None:
    raise RuntimeError("CUDA out of memory")


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def a_bug(*_: Any, **__: Any) -> None:
    raise KeyError("a bug in somebody's grader")


def terminate_everybody() -> None:
    """What a scheduler does to a job that must make room; the launcher passes it on to every rank."""
    os.kill(os.getppid(), signal.SIGTERM)


def arm(moment: str, step: int) -> None:
    if moment in ("killed-in-training", "error-in-training"):
        forward = PolicyEngine._forward_backward

        def dying(policy: PolicyEngine, *args: Any, **kwargs: Any) -> None:
            if policy.step == step - 1 and kwargs.get("backward"):
                die() if moment == "killed-in-training" else out_of_memory()
            forward(policy, *args, **kwargs)

        PolicyEngine._forward_backward = dying  # type: ignore[method-assign]
    elif moment == "killed-in-saving":
        write = state._write_part

        def half(policy: PolicyEngine, folder: Any) -> dict:
            described = write(policy, folder)
            if policy.step == step:
                die()
            return described

        state._write_part = half
    elif moment == "full-disk":
        save_file = state.save_file
        write_part = state._write_part

        def at_step(policy: PolicyEngine, folder: Any) -> dict:
            state.save_file = full_disk if policy.step == step else save_file
            return write_part(policy, folder)

        state._write_part = at_step
    elif moment in ("bug-in-grader", "sigterm"):
        sample = StepSampler.sample

        def sampled(sampler: StepSampler, now: int, *args: Any, **kwargs: Any) -> Any:
            if now == step and moment == "sigterm":
                terminate_everybody()
            elif now == step:
                RoutingGrader.grade = a_bug  # type: ignore[method-assign]
            return sample(sampler, now, *args, **kwargs)

        StepSampler.sample = sampled  # type: ignore[method-assign]
    elif moment != "never":
        raise SystemExit(f"no such moment: {moment}")


if __name__ == "__main__":
    moment, rank, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if os.environ["RANK"] == rank:
        arm(moment, step)
    sys.argv[1:] = sys.argv[4:]
    cli.app()
