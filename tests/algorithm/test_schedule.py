import pytest

from rise_rl.plateau import PlateauRule
from rise_rl.schedule import GuidanceSchedule

FALLING_THEN_FLAT = [0.5 * 0.8**s for s in range(20)] + [0.5 * 0.8**20] * 60


def schedule(remove_at, enabled=True):
    return GuidanceSchedule(enabled, remove_at, PlateauRule())


def test_fixed_removal_counts_guided_steps():
    active = [schedule(3).active(s, [0.5] * s) for s in range(6)]
    assert active == [True, True, True, False, False, False]


def test_never_and_disabled():
    assert all(schedule("never").active(s, FALLING_THEN_FLAT[:s]) for s in range(80))
    assert not any(schedule("never", enabled=False).active(s, FALLING_THEN_FLAT[:s]) for s in range(80))


def test_plateau_removal_is_for_good_and_uses_only_the_past():
    s = schedule("plateau")
    states = []
    for step in range(80):
        gaps = [FALLING_THEN_FLAT[i] if states[i] else None for i in range(step)]  # no gap once guidance is gone
        states.append(s.active(step, gaps))
    switch = states.index(False)
    assert 5 < switch < 80
    assert not any(states[switch:])


def test_zero_guided_steps_is_no_guidance():
    with pytest.raises(TypeError):
        GuidanceSchedule(True, 0)  # the rule is not optional
    assert not schedule(0).active(0, [])
