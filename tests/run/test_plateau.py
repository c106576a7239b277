from __future__ import annotations

import random

import pytest
from pydantic import ValidationError

from rise_rl.plateau import PlateauRule, smoothed


def ema(values: list[float]) -> list[float]:
    out = [values[0]]
    for v in values[1:]:
        out.append(0.9 * out[-1] + 0.1 * v)
    return out


def test_smoothing_starts_at_the_first_gap_and_holds_through_missing_ones():
    assert smoothed([None, 1.0, None, 0.0]) == pytest.approx([None, 1.0, 1.0, 0.9])


@pytest.mark.parametrize("slope", [-0.01, 0.01])
def test_a_gap_that_keeps_moving_has_no_plateau(slope):
    rule = PlateauRule(window=20, tolerance=0.01)
    assert rule.switch_step([0.5 + slope * s for s in range(300)]) is None


def test_a_constant_gap_is_flat_after_the_window():
    assert PlateauRule(window=20).switch_step([0.3] * 20) is None
    assert PlateauRule(window=20).switch_step([0.3] * 21) == 21


def test_fall_then_flat_is_found_window_steps_after_the_last_counted_low():
    gaps = [0.5 - 0.01 * s for s in range(40)] + [0.1] * 100
    rule = PlateauRule(window=15, tolerance=0.02)
    low, last = gaps[0], 0
    for step, value in enumerate(ema(gaps)):
        if value < low - 0.02:
            low, last = value, step
    assert 40 < last < 70
    assert rule.switch_step(gaps) == last + 15 + 1


def test_a_rise_before_the_fall_is_not_taken_for_a_plateau():
    rise, fall = [0.1 + 0.02 * s for s in range(20)], [0.5 - 0.01 * s for s in range(40)]
    found = PlateauRule(window=10, tolerance=0.005).switch_step([*rise, *fall, *[0.1] * 80])
    assert found is not None
    assert found > 60


def test_a_fall_slower_than_the_tolerance_counts_as_flat():
    gaps = [0.5 - 0.0002 * s for s in range(200)]  # 0.004 in a window
    assert PlateauRule(window=20, tolerance=0.01).switch_step(gaps) == 21


@pytest.mark.parametrize("seed", range(20))
def test_noise_neither_ends_guidance_during_the_fall_nor_keeps_it_for_ever(seed):
    noise = random.Random(seed)
    gaps = [max(0.6 - 0.006 * s, 0.12) + noise.gauss(0, 0.05) for s in range(400)]  # falls until step 80
    found = PlateauRule(window=20, tolerance=0.01).switch_step(gaps)
    assert found is not None
    assert 75 < found < 200


@pytest.mark.parametrize("seed", range(10))
def test_the_decision_uses_the_past_only(seed):
    noise = random.Random(seed)
    rule = PlateauRule(window=5, tolerance=0.02)
    gaps = [None if noise.random() < 0.2 else 0.4 * 0.9**s + noise.gauss(0, 0.02) for s in range(80)]
    found = rule.switch_step(gaps)
    assert found is not None
    for known in range(len(gaps)):  # online: after `known` finished steps, is the next one guided?
        online = rule.switch_step(gaps[:known])
        assert online == (found if known >= found else None)
    assert rule.switch_step([*gaps[:found], *[5.0, -5.0] * 20]) == found


def test_steps_without_a_gap_are_no_evidence():
    rule = PlateauRule(window=4)
    assert rule.switch_step([None] * 50) is None
    assert rule.switch_step([None, None, 0.2, 0.2, None, 0.2, 0.2]) is None
    assert rule.switch_step([None, None, 0.2, 0.2, None, 0.2, 0.2, None, 0.2]) == 9
    assert rule.switch_step([]) is None


def test_parameters_are_checked():
    with pytest.raises(ValidationError, match="window"):
        PlateauRule(window=0)
    with pytest.raises(ValidationError, match="patience"):
        PlateauRule(patience=3)  # type: ignore[call-arg]
