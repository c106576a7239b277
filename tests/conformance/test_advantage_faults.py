"""Advantage faults that other trainers have shipped."""

import math

import pytest

from rise_rl.advantages import group_advantages


@pytest.mark.parametrize("size", [2, 3, 6, 7, 12])
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3])
@pytest.mark.parametrize("dropped", [0, 1])
def test_equal_rewards_never_blow_up_from_float_residue(size, value, dropped):
    # the same reward summed in two orders differs in its last bits, which 1 / (std + eps) would blow up
    noisy = [math.nextafter(value, i % 2) for i in range(size)]
    rewards = noisy + [None] * dropped
    assert group_advantages(rewards, ["q"] * len(rewards)) == [0.0] * size + [None] * dropped


@pytest.mark.parametrize("size", [6, 7, 12])
def test_a_reward_of_none_is_dropped_and_the_batch_lives(size):
    rewards = [i / size for i in range(size)]
    whole = group_advantages(rewards, ["q"] * size)
    with_hole = group_advantages([None, *rewards], ["q"] * (size + 1))
    assert with_hole == [None, *whole]
