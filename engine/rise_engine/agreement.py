"""What happens on one rank is known on every rank: results, and failures above all.

A rank that fails alone leaves the others waiting for it in their next collective operation. So work that holds no
collective operation of its own (sampling, grading, files) goes through one of these three, which are collective: all
ranks call them together, and if the work fails on any rank, the same error is raised on all. Objects travel pickled
over gloo; among one rank alone the work is simply called.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather(work: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
    """Runs `work` on every rank; the results of all, by rank.

    A failure is raised on every rank as the error of the lowest rank that failed: on that rank itself, elsewhere one of
    the same type (or of a base that takes a message alone) with the same message. `failed_rank` tells whose it is: also
    where `work` had heard of it from that rank itself, as ranks that sample together do.
    """
    if world_size() == 1:
        return [work(*args, **kwargs)]
    mine, error = None, None
    try:
        mine = work(*args, **kwargs)
    except Exception as raised:
        error = raised
    outcomes: list[Any] = [None] * world_size()
    dist.all_gather_object(outcomes, (mine, None if error is None else portable(error)))
    for sender, (_, theirs) in enumerate(outcomes):
        if theirs is not None:
            failed = failed_rank(theirs)
            failed = sender if failed is None else failed
            told: Any = error if failed == rank() and error is not None else theirs
            told.failed_rank = failed
            raise told
    return [value for value, _ in outcomes]


def each(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Runs `work` on every rank; this rank's own result, which stays here. Failures as in `gather`."""
    kept: list[T] = []
    gather(lambda: kept.append(work(*args, **kwargs)))
    return kept[0]


def once(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Runs `work` on rank 0 alone; its result on every rank. Failures as in `gather`."""
    return gather(lambda: work(*args, **kwargs) if rank() == 0 else None)[0]  # type: ignore[return-value]


def failed_rank(error: BaseException) -> int | None:
    """The rank that the error comes from, if all ranks know about it; None for one that was raised here alone."""
    return getattr(error, "failed_rank", None)


def everywhere(error: T) -> T:
    """`error`, which every rank raises by itself with the same message: known to all, and rank 0's to tell."""
    error.failed_rank = 0  # type: ignore[attr-defined]
    return error


def instead(error: BaseException, better: T) -> T:
    """`better`, to be raised in place of `error`: known to all ranks if that one was."""
    if failed_rank(error) is not None:
        better.failed_rank = failed_rank(error)  # type: ignore[attr-defined]
    return better


def portable(error: Exception) -> Exception:
    """An error of the same type and message that can be sent, or of the nearest base type of which that is true."""
    for kind in type(error).__mro__:
        try:
            copy = kind(str(error))
            if str(copy) == str(error) and str(pickle.loads(pickle.dumps(copy))) == str(error):
                return instead(error, copy)
        except Exception:
            continue
    return instead(error, RuntimeError(f"{type(error).__name__}: {error}"))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
