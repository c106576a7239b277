"""What a person sees while a run goes on: one line per step, the phase under way, and the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from .phases import PHASES


def number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def ungraded(record: Mapping[str, Any]) -> str:
    """What a line says of answers whose verdicts are not all known; they are in none of its numbers."""
    count = record["ungraded_samples"]
    return f"  [bold red]{count} of {record['samples']} answers ungraded[/bold red]" if count else ""


class Progress:
    """Bars on a terminal, plain lines elsewhere. Use as a context manager around the run. steps: 0 where there are
    none to count.
    """

    def __init__(self, steps: int, done: int = 0, console: Console | None = None) -> None:
        self.console = console or Console()
        self.bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.steps, self.done, self.seconds = steps, done, 0.0
        self.timed = 0
        self.task = self.bars.add_task("steps", total=steps, completed=done) if steps else None

    def __enter__(self) -> Progress:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    @contextmanager
    def counting(self, phase: str, total: int) -> Iterator[Callable[..., None]]:
        """Yields a function that takes how many are finished, and of how many if that has become known."""
        task = self.bars.add_task(PHASES.get(phase, phase), total=total)

        def advance(finished: int, of: int | None = None) -> None:
            self.bars.update(task, completed=finished, total=of)

        try:
            yield advance
        finally:
            self.bars.remove_task(task)

    def stepped(self, metrics: dict[str, Any]) -> None:
        self.done = int(metrics["step"])
        self.seconds += metrics["time/step"]
        self.timed += 1
        left = (self.steps - self.done) * self.seconds / self.timed
        if self.task is not None:
            self.bars.update(self.task, completed=self.done)
        self.console.print(
            f"step {self.done}/{self.steps}  reward {number(metrics['reward/natural'])} "
            f"(smoothed {number(metrics['reward/natural_smoothed'])})  guided {number(metrics['reward/guided'])} "
            f"kept {metrics['guided/kept']}/{metrics['guided/generated']}  "
            f"entropy {number(metrics['entropy'], '.2f')}  "
            f"{metrics['time/step']:.1f} s"
            + (f", about {left / 60:.0f} min left" if self.done < self.steps else "")
            + ungraded(metrics),
            highlight=False,
            soft_wrap=True,
        )

    def evaluated(self, record: dict[str, Any]) -> None:
        self.console.print(
            f"held-out reward after step {record['step']}: [bold]{number(record['reward/mean'])}[/bold] "
            f"({record['samples']} answers, {number(record['length/mean'], '.0f')} tokens on average)"
            + ungraded(record),
            highlight=False,
            soft_wrap=True,
        )
