"""What ranks make of a step's prompts and samples, and how an error travels; without a launch."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rise_engine import agreement
from rise_engine.rollout.base import Rollout
from rise_rl.data import DataError, Example
from rise_rl.launch import SAME_REQUEST
from rise_rl.ranks import Ranks, whole_step
from rise_rl.rubric import Criterion, Rubric
from rise_rl.samples import Sample
from rise_rl.step_sampler import StepSamples


def example(uid: str) -> Example:
    return Example(uid, [{"role": "user", "content": uid}], Rubric((Criterion("c", 1.0),)), "d")


def samples(part: list[Example], kind: str, each: int) -> list[Sample]:
    return [
        Sample(e, Rollout(e.uid, i, (1,), (2,), (0.0,), "", "stop", 0), [1.0], 1.0, kind=kind)
        for e in part
        for i in range(each)
    ]


@given(prompts=st.integers(1, 20), ranks=st.integers(1, 8), each=st.integers(1, 3))
def test_the_gathered_step_is_what_one_rank_would_have_sampled(prompts, ranks, each):
    examples = [example(f"u{i}") for i in range(prompts)]
    parts = []
    for rank in range(ranks):
        mine = Ranks(rank, ranks).mine(examples)
        assert abs(len(mine) - prompts / ranks) < 1
        natural = samples(mine, "natural", each)
        metrics = {"dropped": len(mine), "level": 0.25, "mean": float(rank)} if mine else {}
        parts.append(StepSamples({e.uid: (1,) for e in mine}, natural, samples(mine[::2], "guided", 2), metrics))
    whole = whole_step(parts, examples)
    assert list(whole.prompts) == [e.uid for e in examples]
    assert [(s.example.uid, s.rollout.index) for s in whole.natural] == [
        (e.uid, i) for e in examples for i in range(each)
    ]
    order = {e.uid: i for i, e in enumerate(examples)}
    guided = [(order[s.example.uid], s.rollout.index) for s in whole.guided]
    assert guided == sorted(guided)
    assert len(guided) == sum(len(p.guided) for p in parts)
    assert whole.metrics["dropped"] == prompts
    assert whole.metrics["level"] == pytest.approx(0.25)
    expected = sum(r * len(Ranks(r, ranks).mine(examples)) for r in range(ranks)) / prompts
    assert whole.metrics["mean"] == pytest.approx(expected)


class Awkward(ValueError):
    def __init__(self, number: int, where: str) -> None:
        super().__init__(f"{number} at {where}")


@pytest.mark.parametrize(
    "error, kind",
    [
        (DataError("bad", file="f", row=3), DataError),  # str() is what the message was made into
        (OSError(28, "No space left on device"), OSError),
        (KeyError("k"), LookupError),  # KeyError quotes its argument
        (Awkward(3, "here"), ValueError),  # cannot be made from a message
        (type("Local", (RuntimeError,), {})("x"), RuntimeError),  # cannot be pickled
    ],
)
def test_an_error_travels_as_the_nearest_type_that_can(error, kind):
    copy = pickle.loads(pickle.dumps(agreement.portable(error)))
    assert type(copy) is kind
    assert str(copy) == str(error)


def test_one_rank_alone_calls_and_raises_as_usual():
    ranks = Ranks()
    assert ranks.gather(lambda x: x + 1, 2) == [3]
    assert ranks.once(lambda: "a") == ranks.each(lambda: "a") == "a"
    assert ranks.any(True)
    assert not ranks.any(False)
    with pytest.raises(DataError, match="bad") as caught:
        ranks.each(lambda: (_ for _ in ()).throw(DataError("bad")))
    assert agreement.failed_rank(caught.value) is None
    assert ranks.all_raise(caught.value)
    assert not Ranks(1, 2).all_raise(caught.value)
    assert Ranks(1, 2).all_raise(agreement.everywhere(ValueError("seen by all")))


def test_a_signal_that_comes_twice_at_once_is_one_request(monkeypatch):
    import os
    import signal
    from types import SimpleNamespace

    from rich.console import Console

    from rise_rl.launch import stop_signals

    clock = [100.0]
    monkeypatch.setattr("rise_rl.launch.time", SimpleNamespace(monotonic=lambda: clock[0]))  # nobody else's clock
    with stop_signals(Console(quiet=True)) as stopped:
        assert not stopped
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # the launcher passes on what the terminal has sent already
        assert len(stopped) == 1
        clock[0] += SAME_REQUEST + 0.1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
