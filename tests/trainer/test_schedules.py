"""Overlapped steps give what lockstep steps give, sooner, and end cleanly whatever fails."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from rise_engine.config import EngineConfig
from rise_engine.policy import PolicyEngine
from rise_engine.rollout.transformers import TransformersRollout
from rise_rl.config import ConfigError, load_config
from rise_rl.data import load_examples
from rise_rl.graders import RuleGrader
from rise_rl.phases import PhaseTimes
from rise_rl.progress import Progress
from rise_rl.step_sampler import StepSampler

PATIENCE = 60.0
"""Seconds until a test gives up on what should happen meanwhile."""


class SlowGrader:
    """Rules, as slow as a judge: `meanwhile` is called before a group of that prompt is graded."""

    def __init__(self, meanwhile: dict[str, Callable[[], object]] | None = None) -> None:
        self.rules, self.meanwhile = RuleGrader(), meanwhile or {}
        self.began: list[str] = []

    def grade(self, items):
        self.began.append(items[0].uid)
        self.meanwhile.get(items[0].uid, lambda: None)()
        return self.rules.grade(items)


def soon(condition: Callable[[], bool]) -> bool:
    """Waits until it holds; False if it never does."""
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def around_sampling(rollouts, monkeypatch, before=lambda uid: None, after=lambda uid: None) -> None:
    """Calls `before` and `after` with the prompt of every request that the engine answers."""
    generate = rollouts.generate

    def watching(requests, sampling, progress=None):
        for request in requests:
            before(request.uid)
        found = generate(requests, sampling, progress)
        for request in requests:
            after(request.uid)
        return found

    monkeypatch.setattr(rollouts, "generate", watching)


@pytest.fixture(scope="module")
def rollouts(tiny_folder):
    engine = TransformersRollout(PolicyEngine(tiny_folder, EngineConfig()), max_rows=4)
    engine.sync(0)
    return engine


def sampler(path, rollouts, grader, schedule) -> StepSampler:
    config = load_config(path, [f"rollout.schedule={schedule}", "grpo.prompts_per_step=3"])
    progress = Progress(1, console=Console(quiet=True))
    return StepSampler(
        config,
        tokenizer=rollouts.policy.tokenizer,
        rollouts=rollouts,
        grader=grader,
        progress=progress,
        times=PhaseTimes(),
    )


def a_step(path, rollouts, grader, schedule):
    examples = load_examples(path.parent / "train.jsonl")[:3]
    return sampler(path, rollouts, grader, schedule).sample(1, examples, guiding=True)


def test_an_overlapped_step_has_the_same_samples_in_the_same_order(tiny_config, rollouts):
    """Also if the first prompt's grades come last."""
    path = tiny_config()
    expected = a_step(path, rollouts, SlowGrader(), "lockstep")
    grader = SlowGrader({"train-0": lambda: soon(lambda: {"train-1", "train-2"} <= set(grader.began))})
    found = a_step(path, rollouts, grader, "overlapped")

    def but_logprobs(samples):  # another batch rounds otherwise
        return [replace(s, rollout=replace(s.rollout, logprobs=())) for s in samples]

    assert but_logprobs(found.natural) == but_logprobs(expected.natural)
    assert but_logprobs(found.guided) == but_logprobs(expected.guided)
    assert (found.prompts, found.metrics) == (expected.prompts, expected.metrics)
    assert len(found.natural) == 12
    assert found.guided


@pytest.mark.parametrize("guiding, told", [(True, ["grader"]), (False, [])])
def test_peers_hear_of_a_failure_only_where_they_wait_for_guided_requests(
    tiny_config, rollouts, monkeypatch, guiding, told
):
    path, grader, heard = tiny_config(), SlowGrader(), []

    def broken(_):
        raise LookupError("grader")

    monkeypatch.setattr(grader.rules, "grade", broken)
    monkeypatch.setattr(rollouts, "withdraw", lambda error: heard.append(str(error)))
    examples = load_examples(path.parent / "train.jsonl")[:1]
    with pytest.raises(LookupError, match="grader"):
        sampler(path, rollouts, grader, "lockstep").sample(1, examples, guiding=guiding)
    assert heard == told


def test_groups_are_graded_while_others_are_sampled(tiny_config, rollouts, monkeypatch):
    """The second prompt is sampled only while the first one is graded, whose grades wait for the second's to begin."""
    met = []

    def before(uid: str) -> None:
        if uid == "train-1":
            met.append(soon(lambda: "train-0" in grader.began))

    grader = SlowGrader({"train-0": lambda: met.append(soon(lambda: "train-1" in grader.began))})
    around_sampling(rollouts, monkeypatch, before=before)
    a_step(tiny_config(), rollouts, grader, "overlapped")
    assert all(met)
    assert len(met) > 4


def test_without_guidance_only_natural_answers_are_sampled(tiny_config, rollouts):
    path = tiny_config()
    examples = load_examples(path.parent / "train.jsonl")[:2]
    found = sampler(path, rollouts, SlowGrader(), "overlapped").sample(1, examples, guiding=False)
    assert (len(found.natural), found.guided, found.metrics) == (8, [], {})


@pytest.mark.parametrize("fails", ["grader", "engine", "guidance"])
def test_an_error_ends_the_step_and_no_thread_is_left(tiny_config, rollouts, monkeypatch, fails):
    path = tiny_config()
    grader = SlowGrader({"train-1": lambda: time.sleep(0.2)})

    class Broken(Exception):
        pass

    def broken(*_, **__):
        raise Broken(fails)

    if fails == "grader":
        monkeypatch.setattr(grader.rules, "grade", broken)
    elif fails == "engine":
        monkeypatch.setattr(rollouts, "generate", broken)
    else:
        monkeypatch.setattr("rise_rl.step_sampler.guided_prompt", broken)
    with pytest.raises(Broken, match=fails):
        a_step(path, rollouts, grader, "overlapped")
    assert not [t for t in threading.enumerate() if t.name.startswith("rise-rl grading")]


def test_times_are_those_of_the_engine_and_of_waiting_for_grades(tiny_config, rollouts, monkeypatch):
    path = tiny_config()
    answers: Counter[str] = Counter()
    around_sampling(rollouts, monkeypatch, after=lambda uid: answers.update([uid]))

    def last() -> None:
        """Graded slowly, once the others have their guided answers: until then the engine had something to do."""
        assert soon(lambda: min(answers["train-0"], answers["train-1"]) > 4)
        time.sleep(0.4)

    step = sampler(path, rollouts, SlowGrader({"train-2": last}), "overlapped")
    step.sample(1, load_examples(path.parent / "train.jsonl")[:3], guiding=True)
    times = step.schedule.times.take()
    assert set(times) == {"rollout", "guided_rollout", "grade"}
    assert times["grade"] > 0.3  # guided answers of the last prompt could not begin before


def test_overlapped_needs_an_engine_of_one_rank(tiny_config):
    with pytest.raises(ConfigError, match=r"schedule: overlapped needs vllm\.tensor_parallel_size 1"):
        load_config(tiny_config(), ["rollout.schedule=overlapped", "rollout.vllm.tensor_parallel_size=2"])
