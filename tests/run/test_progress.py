"""What a person reads while a run goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rise_engine.rollout.base import Rollout
from rise_rl.data import Example
from rise_rl.graders import JudgeUnavailable
from rise_rl.progress import Progress
from rise_rl.rubric import Criterion, Rubric
from rise_rl.samples import Sample, require_graded

STEP = {
    **{"reward/natural": 0.5, "reward/natural_smoothed": 0.5, "reward/guided": None, "entropy": 1.0, "time/step": 90.0},
    **{"guided/kept": 0, "guided/generated": 0, "samples": 16},
}


def said(say, *, steps: int = 3, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    with Progress(steps, console=console) as progress:
        say(progress)
    return console.file.getvalue()


@pytest.mark.parametrize("count, line", [(0, ""), (3, "3 of 16 answers ungraded")])
def test_answers_without_a_reward_are_told_where_the_reward_is(count, line):
    evaluation = {"step": 1, "reward/mean": 0.5, "length/mean": 9.0, "samples": 16, "ungraded_samples": count}
    for text in (
        said(lambda p: p.stepped({**STEP, "step": 1, "ungraded_samples": count})),
        said(lambda p: p.evaluated(evaluation)),
    ):
        assert line in text
        assert ("ungraded" in text) == bool(count)


def test_time_is_left_only_while_steps_are():
    lines = said(lambda p: [p.stepped({**STEP, "step": step, "ungraded_samples": 0}) for step in (1, 2, 3)])
    assert ["min left" in line for line in lines.splitlines()] == [True, True, False]
    assert "about 3 min left" in lines


@pytest.mark.parametrize("steps", [0, 3])
def test_steps_are_counted_only_where_there_are_any(steps):
    def grading(progress):
        with progress.counting("grade", 2) as advance:
            advance(1)
            progress.bars.refresh()

    text = said(grading, steps=steps, terminal=True)
    assert "grading" in text
    assert ("steps" in text) == bool(steps)


@pytest.mark.parametrize("rewards, stops", [([None, None], True), ([None, 0.0], False), ([], False)])
def test_a_step_of_which_no_answer_was_graded_stops_the_run(rewards, stops):
    example = Example("a", ({"role": "user", "content": "Hi"},), Rubric((Criterion("is kind", 1.0, {}),)), "")
    rollout = Rollout("a", 0, (1,), (2,), (-1.0,), "text", "stop", 0)
    samples = [Sample(example, rollout, [r], r) for r in rewards]
    if not stops:
        require_graded(samples, "step 4")
        return
    with pytest.raises(JudgeUnavailable, match=r"step 4: all 2 answers are ungraded.*judge\.base_urls") as error:
        require_graded(samples, "step 4")
    assert error.value.failed_rank == 0  # known on every rank, so that what was trained is saved
