"""RuscaRL's scaffold: the worked values of its schedule, what is drawn, and where it is shown."""

from __future__ import annotations

import pytest

from rise_rl.rubric import Criterion, Rubric
from rise_rl.scaffold import draw_criteria, scaffolded, shown_count, strength

RUBRIC = Rubric([Criterion(f"point {k}", 1.0 if k else -1.0) for k in range(12)])


@pytest.mark.parametrize(
    "step, expected",
    [(1, [12, 10, 9, 7, 5, 3, 2, 0]), (101, [6, 5, 4, 3, 3, 2, 1, 0]), (120, [0] * 8), (500, [0] * 8)],
)
def test_shown_counts_of_the_worked_example(step, expected):
    """500 steps, 12 criteria, groups of 8."""
    level = strength(step, 500, steepness=125.0, midpoint=0.2)
    assert [shown_count(12, level, i, 8) for i in range(8)] == expected


def test_half_is_left_at_the_midpoint_and_long_runs_do_not_overflow():
    assert strength(21, 101, steepness=125.0, midpoint=0.2) == pytest.approx(0.5)
    assert strength(1, 2, steepness=1e6, midpoint=0.5) == pytest.approx(1.0)
    assert strength(2, 2, steepness=1e6, midpoint=0.5) < 1e-300


def test_criteria_are_drawn_without_replacement_anew_for_every_rollout_and_step():
    def draw(**changes):
        return draw_criteria(RUBRIC, 6, **{"seed": 0, "step": 1, "uid": "u", "index": 0, **changes})

    assert len(set(draw())) == 6
    assert draw() == draw()
    assert len({tuple(draw(**change)) for change in ({}, {"seed": 1}, {"step": 2}, {"uid": "v"}, {"index": 1})}) == 5
    assert draw_criteria(RUBRIC, 0, seed=0, step=1, uid="u", index=7) == []
    often = [0] * 12
    for step in range(600):
        for k in draw(step=step):
            often[k] += 1
    assert all(240 < n < 360 for n in often)  # 300 expected, standard deviation 12


def test_the_scaffold_is_a_system_message():
    user = {"role": "user", "content": "Write."}
    [system, same] = scaffolded([user], RUBRIC, [3, 0])
    assert system["role"] == "system"
    assert system["content"].splitlines()[1:] == ["- avoid: point 0", "- point 3"]
    assert same == user
    own = {"role": "system", "content": "Be brief."}
    [system, same] = scaffolded([own, user], RUBRIC, [3])
    assert system["content"].startswith("Be brief.\n\n")
    assert system["content"].endswith("- point 3")
    assert (same, own["content"]) == (user, "Be brief.")
    assert scaffolded([user], RUBRIC, []) == [user]
