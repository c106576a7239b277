import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rise_rl.advantages import group_advantages, overlong_penalty


def oracle(rewards):
    r = np.array(rewards, dtype=np.float64)
    return (r - r.mean()) / (r.std(ddof=1) + 1e-6)


def test_matches_the_equation_per_uid_in_any_order():
    rewards, uids = [0.2, 0.9, 0.4, 0.1, 0.7, 0.3], ["a", "b", "a", "b", "a", "b"]
    found = group_advantages(rewards, uids)
    for uid in "ab":
        rows = [i for i, u in enumerate(uids) if u == uid]
        np.testing.assert_allclose([found[i] for i in rows], oracle([rewards[i] for i in rows]), rtol=1e-12)


def test_same_text_under_two_uids_is_two_groups():
    assert group_advantages([0.0, 1.0, 1.0, 0.0], ["q#1", "q#2", "q#1", "q#2"]) == pytest.approx(
        [-0.70710578, 0.70710578, 0.70710578, -0.70710578], abs=1e-6
    )


def test_ungraded_samples_leave_the_statistics():
    assert group_advantages([0.2, None, 0.8], ["q"] * 3) == pytest.approx(
        [*oracle([0.2, 0.8])[:1], None, oracle([0.2, 0.8])[1]]
    )


@pytest.mark.parametrize("rewards", [[0.4], [0.4, None], [None, None], []])
def test_fewer_than_two_graded_samples_give_zero(rewards):
    assert group_advantages(rewards, ["q"] * len(rewards)) == [None if r is None else 0.0 for r in rewards]


def test_lengths_must_agree():
    with pytest.raises(ValueError, match=r"uids: expected one per reward \(2\), found 1"):
        group_advantages([0.1, 0.2], ["q"])


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16))
def test_advantages_sum_to_zero_and_keep_the_order(rewards):
    found = group_advantages(rewards, ["q"] * len(rewards))
    assert abs(sum(found)) < 1e-6 * len(found) + 1e-9
    for (r1, a1), (r2, a2) in zip(zip(rewards, found), list(zip(rewards, found))[1:]):
        assert (a1 - a2) * (r1 - r2) >= 0


@pytest.mark.parametrize("length, expected", [(0, 0.0), (4096, 0.0), (4097, -0.5 / 4096), (6144, -0.25), (8192, -0.5)])
def test_overlong_penalty_with_the_papers_values(length, expected):
    assert overlong_penalty(length, max_length=8192, buffer=4096, factor=0.5) == expected


def test_overlong_penalty_without_a_buffer_is_off_and_a_bad_buffer_is_refused():
    assert overlong_penalty(100, max_length=100, buffer=0, factor=0.5) == 0.0
    with pytest.raises(ValueError, match="buffer: expected 0 <= buffer <= max_length"):
        overlong_penalty(10, max_length=100, buffer=101, factor=0.5)
