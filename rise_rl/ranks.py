"""The ranks of a training run: who takes which prompts, who writes, and how all of them end together.

Every rank holds every step whole. It samples and grades its own prompts, gathers what the others sampled, computes the
same advantages, weights and decisions from the same numbers, and trains on its share of the sequences. Rank 0 alone
writes and prints.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from rise_engine import agreement
from rise_engine.distributed import init_distributed
from rise_engine.errors import EngineError

from .data import Example
from .errors import RiseError
from .samples import Sample
from .step_sampler import StepSamples

T = TypeVar("T")

KNOWN = (RiseError, EngineError, OSError)
"""Errors whose message is enough for a person; others are bugs and keep their traceback."""

STORE_TIMEOUT = timedelta(seconds=5)
FAILURE = "rise-rl/failure"
"""Key in the process group's store: what the first rank to end with an error of its own said."""


@dataclass(frozen=True)
class Ranks:
    """This process among the processes of the run. `gather`, `each` and `once` are collective (rise_engine.agreement):
    an exception of one rank is raised on all of them.
    """

    rank: int = 0
    world_size: int = 1

    @classmethod
    def join(cls, timeout: timedelta) -> Ranks:
        """The group that a launcher started us in; without a launcher, this process alone."""
        if not launched():
            return cls()
        rank, world_size, _ = init_distributed(timeout)
        return cls(rank, world_size)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mine(self, items: Sequence[T]) -> list[T]:
        """This rank's part of a step's prompts: every world_size-th, so that parts differ by one at most."""
        return list(items[self.rank :: self.world_size])

    def gather(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Runs `work` on every rank; the results of all, by rank."""
        return agreement.gather(work, *args, **kwargs)

    def each(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs `work` on every rank; this rank's own result."""
        return agreement.each(work, *args, **kwargs)

    def once(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs `work` on rank 0 alone; its result on every rank."""
        return agreement.once(work, *args, **kwargs)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return any(self.gather(lambda: flag))

    def all_raise(self, error: BaseException) -> bool:
        """Whether every rank is handling this error, so that they can do something about it together."""
        return self.world_size == 1 or agreement.failed_rank(error) is not None


def launched() -> bool:
    """Whether a launcher (torchrun, deepspeed, Slurm with the variables exported) says that we are one of several."""
    return any(name in os.environ for name in ("RANK", "WORLD_SIZE")) or dist.is_initialized()


def in_order(samples: Iterable[Sample], examples: Sequence[Example]) -> list[Sample]:
    """The samples of all ranks in the order of the step's prompts; a prompt's own samples keep theirs."""
    position = {e.uid: i for i, e in enumerate(examples)}
    return sorted(samples, key=lambda s: position[s.example.uid])


def whole_step(parts: Sequence[StepSamples], examples: Sequence[Example]) -> StepSamples:
    """What all ranks sampled, as one rank would have sampled it. Metrics: whole numbers are counts and add up, others
    are means over the natural answers.
    """
    prompts = {uid: ids for part in parts for uid, ids in part.prompts.items()}
    natural = in_order((s for part in parts for s in part.natural), examples)
    metrics: dict[str, float] = {}
    for part in parts:
        for name, value in part.metrics.items():
            share = 1 if isinstance(value, int) else len(part.natural) / len(natural)
            metrics[name] = metrics.get(name, 0) + value * share
    return StepSamples(
        prompts={e.uid: prompts[e.uid] for e in examples},
        natural=natural,
        guided=in_order((s for part in parts for s in part.guided), examples),
        metrics=metrics,
    )


# --- the end ---------------------------------------------------------------------------------------------------------


def fail(error: Exception, say: Callable[[str], None]) -> NoReturn:
    """Ends this rank because of `error`, at once and with a code that makes the launcher end the others. On one rank,
    `say` is given the message: the one it comes from.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the launcher may have noticed already, and there is a word to say
        signal.signal(number, signal.SIG_IGN)
    if _is_mine(error):
        known = isinstance(error, KNOWN)
        say(f"rank {_my_rank()}: {error if known else _unexpected(error)}")
    leave(2 if isinstance(error, KNOWN) else 1)


def leave(code: int) -> NoReturn:
    """Ends this process now. Interpreter and process group are not taken down in order: with a peer gone that can wait
    for it without end.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_mine(error: Exception) -> bool:
    """An error that all ranks raised together is told by the rank it comes from. Another is told by whoever gets to the
    group's store first, and that is the cause: the rest notice only once the rank that failed has gone.
    """
    if not dist.is_initialized():  # the same mistake on every rank, most likely: one line a machine
        return os.environ.get("LOCAL_RANK", "0") == "0"
    failed = agreement.failed_rank(error)
    return _my_rank() == (_first_to_fail() if failed is None else failed)


def _first_to_fail() -> int:
    me = _my_rank()
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(STORE_TIMEOUT)
        return int(store.compare_set(FAILURE, "", str(me)))
    except (RuntimeError, ValueError):  # the store went with the rank that held it
        return me


def _my_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _unexpected(error: Exception) -> str:
    if _lost_contact(error):
        return (
            "lost contact with another rank, whose process ended without a word of its own (killed, or out of "
            f"memory?). The last checkpoint stands: go on with --resume. ({error})"
        )
    return "".join(traceback.format_exception(error)).rstrip()


def _lost_contact(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistBackendError) or "gloo/transport" in text or "connection closed by peer" in text
