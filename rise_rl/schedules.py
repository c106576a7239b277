"""In which order the answers of a step are sampled, graded and followed by guided ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

from rise_engine.rollout.base import Rollout, RolloutEngine, RolloutRequest, RolloutStream, Sampling

from .data import Example
from .graders.base import Grader
from .phases import PhaseTimes
from .progress import Progress
from .samples import Kind, Sample, grade_rollouts

GRADING_THREADS = 16
"""Groups that are graded at once; how many calls that is, a judge bounds itself."""


@dataclass(frozen=True)
class Asked:
    """A request, and the example its answer is graded by. shown: the criteria that its prompt names."""

    example: Example
    request: RolloutRequest
    shown: tuple[int, ...] = ()


Guide = Callable[[Sequence[Sample]], list[Asked]]
"""The guided requests that one prompt's natural answers call for; maybe none."""


class Lockstep:
    """All natural answers, all their grades, all guided answers, all their grades. The same calls in every run."""

    def __init__(
        self, rollouts: RolloutEngine, grader: Grader, sampling: Sampling, progress: Progress, times: PhaseTimes
    ) -> None:
        self.rollouts, self.grader, self.sampling = rollouts, grader, sampling
        self.progress, self.times = progress, times

    def __call__(self, natural: Sequence[Asked], guide: Guide | None) -> tuple[list[Sample], list[Sample]]:
        """Natural samples in the order asked for, guided ones in the order of the prompts."""
        rollouts = self._generate("rollout", natural)
        if guide is None:
            return self._grade(natural, rollouts, "natural"), []
        try:
            samples = self._grade(natural, rollouts, "natural")
            asked = [request for group in by_prompt(samples) for request in guide(group)]
        except Exception as error:
            self.rollouts.withdraw(error)
            raise
        return samples, self._grade(asked, self._generate("guided_rollout", asked), "guided")

    def _generate(self, phase: str, asked: Sequence[Asked]) -> list[Rollout]:
        with self.times(phase), self.progress.counting(phase, len(asked)) as advance:
            # Also without any request: ranks that hold one model together call it together.
            return self.rollouts.generate([a.request for a in asked], self.sampling, advance)

    def _grade(self, asked: Sequence[Asked], rollouts: Sequence[Rollout], kind: Kind) -> list[Sample]:
        with self.times("grade"):
            return _graded(self.grader, asked, rollouts, kind) if asked else []


class Overlapped(Lockstep):
    """A prompt's answers are graded, and its guided answers begun, as soon as its natural ones are there.

    The grader is called from several threads. The samples come in the same order as in lockstep, of the same seeds; an
    error of engine or grader ends the step, and no thread outlives it.
    """

    def __call__(self, natural: Sequence[Asked], guide: Guide | None) -> tuple[list[Sample], list[Sample]]:
        order = list(dict.fromkeys(a.example.uid for a in natural))
        groups = [_Group("natural", [a for a in natural if a.example.uid == uid]) for uid in order]
        with self.rollouts.stream(self.sampling) as stream, _Grading(self.grader) as grading, self._counting() as told:
            running = _begin(stream, groups)
            while running or grading.pending:
                if running:
                    waiting = any(group.kind == "natural" for group, _ in running.values())
                    with self.times("rollout" if waiting else "guided_rollout"):
                        finished = stream.advance()
                    for ticket, rollout in finished:
                        group, place = running.pop(ticket)
                        if group.place(place, rollout):
                            grading.begin(group)
                with self.times("grade"):  # what grading costs here is the time spent waiting for nothing else
                    graded = grading.finished(wait_for_one=not running)
                begun = (
                    [] if guide is None else [_Group("guided", guide(g.samples)) for g in graded if g.kind == "natural"]
                )
                begun = [group for group in begun if group.asked]
                running |= _begin(stream, begun)
                groups += begun
                told(groups)
        position = {uid: i for i, uid in enumerate(order)}
        guided = [sample for group in groups if group.kind == "guided" for sample in group.samples]
        return (
            [sample for group in groups if group.kind == "natural" for sample in group.samples],
            sorted(guided, key=lambda sample: position[sample.example.uid]),
        )

    @contextmanager
    def _counting(self) -> Iterator[Callable[[Sequence[_Group]], None]]:
        phases: dict[Kind, str] = {"natural": "rollout", "guided": "guided_rollout"}
        with self.progress.counting("rollout", 0) as natural, self.progress.counting("guided_rollout", 0) as guided:
            bars = {"natural": natural, "guided": guided}

            def told(groups: Sequence[_Group]) -> None:
                for kind in phases:
                    mine = [g for g in groups if g.kind == kind]
                    bars[kind](sum(g.answered for g in mine), sum(len(g.asked) for g in mine))

            yield told


@dataclass
class _Group:
    """Requests of one prompt and one kind that are graded together."""

    kind: Kind
    asked: list[Asked]
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    @property
    def answered(self) -> int:
        return len(self.rollouts)

    def place(self, index: int, rollout: Rollout) -> bool:
        """Whether that was the last one."""
        self.rollouts[index] = rollout
        return self.answered == len(self.asked)


class _Grading:
    """Groups that are being graded, each in a thread."""

    def __init__(self, grader: Grader) -> None:
        self.grader = grader
        self.running: dict[Future[list[Sample]], _Group] = {}

    def __enter__(self) -> _Grading:
        self.threads = ThreadPoolExecutor(GRADING_THREADS, thread_name_prefix="rise-rl grading")
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)

    @property
    def pending(self) -> int:
        return len(self.running)

    def begin(self, group: _Group) -> None:
        rollouts = [group.rollouts[i] for i in range(len(group.asked))]
        self.running[self.threads.submit(_graded, self.grader, group.asked, rollouts, group.kind)] = group

    def finished(self, *, wait_for_one: bool) -> list[_Group]:
        """Groups whose samples are there now. Raises what the grader raised."""
        done = wait(self.running, timeout=None if wait_for_one else 0, return_when=FIRST_COMPLETED).done
        groups = []
        for future in done:
            group = self.running.pop(future)
            group.samples = future.result()
            groups.append(group)
        return groups


def _begin(stream: RolloutStream, groups: Sequence[_Group]) -> dict[int, tuple[_Group, int]]:
    """What the stream's tickets stand for: group, and place in it."""
    places = [(group, i) for group in groups for i in range(len(group.asked))]
    return dict(zip(stream.add([group.asked[i].request for group, i in places]), places))


def _graded(grader: Grader, asked: Sequence[Asked], rollouts: Sequence[Rollout], kind: Kind) -> list[Sample]:
    return grade_rollouts(grader, [a.example for a in asked], rollouts, [a.shown for a in asked], kind)


def by_prompt(samples: Iterable[Sample]) -> list[list[Sample]]:
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.example.uid, []).append(sample)
    return list(groups.values())
