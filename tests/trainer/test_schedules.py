"""Overlapped steps give what lockstep steps give, sooner, and end cleanly whatever fails."""

from __future__ import annotations

import threading
import time
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


class SlowGrader:
    """Rules, as slow as a judge for some prompts. moments: (uid, began, ended, thread) of every call."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.rules, self.seconds = RuleGrader(), seconds or {}
        self.moments: list[tuple[str, float, float, str]] = []

    def grade(self, items):
        began = time.perf_counter()
        time.sleep(max((self.seconds.get(item.uid, 0.0) for item in items), default=0.0))
        found = self.rules.grade(items)
        self.moments.append((items[0].uid, began, time.perf_counter(), threading.current_thread().name))
        return found


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
    found = a_step(path, rollouts, SlowGrader({"train-0": 0.3}), "overlapped")

    def but_logprobs(samples):  # another batch rounds otherwise
        return [replace(s, rollout=replace(s.rollout, logprobs=())) for s in samples]

    assert but_logprobs(found.natural) == but_logprobs(expected.natural)
    assert but_logprobs(found.guided) == but_logprobs(expected.guided)
    assert (found.prompts, found.metrics) == (expected.prompts, expected.metrics)
    assert len(found.natural) == 12
    assert found.guided


def test_groups_are_graded_while_others_are_sampled(tiny_config, rollouts, monkeypatch):
    grader, moments = SlowGrader({f"train-{i}": 0.2 for i in range(3)}), []
    generate = rollouts.generate

    def timed(requests, sampling, progress=None):
        moments.append((requests[0].uid, time.perf_counter()))
        return generate(requests, sampling, progress)

    monkeypatch.setattr(rollouts, "generate", timed)
    a_step(tiny_config(), rollouts, grader, "overlapped")
    first_graded = min(began for _, began, *_ in grader.moments)
    assert sum(began > first_graded for _, began in moments) >= 2  # more was sampled meanwhile
    assert any(
        a[1] < b[1] < a[2] for a in grader.moments for b in grader.moments if a is not b
    )  # and two groups were graded at once


def test_without_guidance_only_natural_answers_are_sampled(tiny_config, rollouts):
    path = tiny_config()
    examples = load_examples(path.parent / "train.jsonl")[:2]
    found = sampler(path, rollouts, SlowGrader(), "overlapped").sample(1, examples, guiding=False)
    assert (len(found.natural), found.guided, found.metrics) == (8, [], {})


@pytest.mark.parametrize("fails", ["grader", "engine", "guidance"])
def test_an_error_ends_the_step_and_no_thread_is_left(tiny_config, rollouts, monkeypatch, fails):
    path = tiny_config()
    grader = SlowGrader({"train-1": 0.2})

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


def test_times_are_those_of_the_engine_and_of_waiting_for_grades(tiny_config, rollouts):
    path = tiny_config()
    step = sampler(path, rollouts, SlowGrader({"train-2": 0.4}), "overlapped")
    step.sample(1, load_examples(path.parent / "train.jsonl")[:3], guiding=True)
    times = step.schedule.times.take()
    assert set(times) == {"rollout", "guided_rollout", "grade"}
    assert times["grade"] > 0.3  # guided answers of the last prompt could not begin before


def test_overlapped_needs_an_engine_of_one_rank(tiny_config):
    with pytest.raises(ConfigError, match=r"schedule: overlapped needs vllm\.tensor_parallel_size 1"):
        load_config(tiny_config(), ["rollout.schedule=overlapped", "rollout.vllm.tensor_parallel_size=2"])
