"""Where curves go besides metrics.jsonl: TensorBoard, wandb and trackio."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .errors import RiseError

PROJECT = "rise-rl"
"""Project name at wandb and trackio; WANDB_PROJECT overrides it at wandb."""


class Tracker(Protocol):
    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in `folder`. purge_step: on resume, TensorBoard forgets what earlier files say from this step on."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """One wandb run per run folder, resumed under the same id. Where it is sent (or WANDB_MODE=offline) is wandb's."""

    def __init__(self, folder: Path, name: str, run_id: str, config: Mapping[str, Any]) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self.run = wandb.init(
            project=project, name=name, id=run_id, dir=str(folder), config=dict(config), resume="allow"
        )

        self.run.define_metric("eval/*", step_metric="eval/step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """wandb takes no row of an earlier step, so an evaluation that was made up for joins the row it is at; its
        curves are drawn over its own step.
        """
        own = {"eval/step": step} if is_evaluation(values) else {}
        self.run.log({**values, **own}, step=max(step, self.run.step) if own else step)

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """One trackio run per run folder, local unless TRACKIO_SPACE_ID says otherwise."""

    def __init__(self, run_id: str, config: Mapping[str, Any]) -> None:
        import trackio

        self.run = trackio.init(project=PROJECT, name=run_id, config=dict(config), resume="allow")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class Unrepeated:
    """For a tracker that cannot take steps back: what it was sent before a kill, and a resumed run computes again with
    the same numbers, is not sent twice. Steps and evaluations count each for themselves, because an evaluation that
    failed is made up for after its step has been sent.
    """

    def __init__(self, tracker: Tracker, sent_until: int, evaluated_until: int) -> None:
        self.tracker, self.sent_until, self.evaluated_until = tracker, sent_until, evaluated_until

    def log(self, values: Mapping[str, float], step: int) -> None:
        if step > (self.evaluated_until if is_evaluation(values) else self.sent_until):
            self.tracker.log(values, step)

    def close(self) -> None:
        self.tracker.close()


def is_evaluation(values: Mapping[str, float]) -> bool:
    return any(name.startswith("eval/") for name in values)


def check_trackers(names: Sequence[str]) -> None:
    """Raises RiseError, before anything is made, for a tracker that is asked for and not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise RiseError(f"trackers: {name} is not installed; `pip install {name}`, or leave it out of `trackers`")


def open_trackers(
    names: Sequence[str],
    folder: Path,
    *,
    name: str,
    run_id: str,
    config: Mapping[str, Any],
    resumed_after: int | None = None,
    sent_until: int = -1,
    evaluated_until: int = -1,
) -> list[Tracker]:
    """Those in `names`. resumed_after: step of the checkpoint a run goes on from, None for a new
    run; sent_until, evaluated_until: last step and last evaluation that were logged before it.
    """
    check_trackers(names)
    trackers: list[Tracker] = []
    if "tensorboard" in names:
        purge = None if resumed_after is None else first_step_again(resumed_after)
        trackers.append(TensorBoard(folder / "tensorboard", purge))
    if "wandb" in names:
        trackers.append(Unrepeated(Wandb(folder, name, run_id, config), sent_until, evaluated_until))
    if "trackio" in names:
        trackers.append(Unrepeated(Trackio(run_id, config), sent_until, evaluated_until))
    return trackers


def first_step_again(resumed_after: int) -> int:
    """The first step a resumed run logs: without a checkpoint (0) the untrained model is evaluated again too."""
    return resumed_after + 1 if resumed_after else 0


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """What a curve can show: numbers and truth values, not null, text or lists."""
    return {k: float(v) for k, v in values.items() if isinstance(v, int | float) and k != "step"}
