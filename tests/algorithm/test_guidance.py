import pytest

from rise_rl.guidance import (
    TEMPLATES,
    add_hint,
    draw_template,
    guided_gains,
    guided_prompt,
    priorities,
    select_feedback,
)
from rise_rl.rubric import Criterion, Rubric

HEALTH_NAMES = ["R0", "R9", "R10", "R15", "R17", "R18"]
HEALTH = Rubric([Criterion(name, weight) for name, weight in zip(HEALTH_NAMES, [10, 8, 8, 9, 9, 6])])


def verdicts_with_misses(misses, rollouts):
    return [[0.0 if i < m else 1.0 for m in misses] for i in range(rollouts)]


def test_golden_health_case():
    verdicts = verdicts_with_misses([8, 8, 8, 2, 8, 8], 8)
    assert priorities(HEALTH, verdicts) == [80, 64, 64, 18, 72, 48]
    assert [HEALTH_NAMES[k] for k in select_feedback(HEALTH, verdicts, 5)] == ["R0", "R17", "R9", "R10", "R18"]
    assert sum(v for row in verdicts for v in row) == 6  # coverage 6 of 48


def test_met_criteria_are_never_fed_back():
    verdicts = verdicts_with_misses([0, 3, 0, 0, 0, 0], 8)
    assert select_feedback(HEALTH, verdicts, 5) == [1]
    assert select_feedback(HEALTH, verdicts_with_misses([0] * 6, 8), 5) == []


def test_negative_criteria_count_when_met():
    rubric = Rubric([Criterion("good", 5), Criterion("bad", -8)])
    assert priorities(rubric, [["met", "met"], ["not_met", "not_met"], ["met", "met"]]) == [5, 16]


def test_ungraded_rollouts_count_nowhere_and_graded_verdicts_miss_by_the_rest():
    rubric = Rubric([Criterion("a", 4), Criterion("b", 2)])
    assert priorities(rubric, [["unknown", 0.25], [0.0, 0.25], [1.0, 0.5], [0.0, None]]) == [4, 2.5]
    assert select_feedback(rubric, [["unknown", 0.0], [0.0, None]], 2) == []


def test_ties_go_to_the_larger_weight_then_to_rubric_order():
    rubric = Rubric([Criterion("a", 2), Criterion("b", 4), Criterion("c", 4), Criterion("d", -4)])
    verdicts = [[0, 0, 0, 1], [0, 1, 1, 0]]  # priorities 4, 4, 4, 4
    assert select_feedback(rubric, verdicts, 4) == [1, 2, 3, 0]


@pytest.mark.parametrize(
    "guided, natural, expected",
    [
        ([0.9, 0.5, 0.2], [0.4, 0.6], [0.4, 0.0, 0.0]),
        ([1.0, None], [0.0, 0.0], [1.0, 0.0]),
        ([0.9], [0.3, None], [0.6]),
        ([0.9, 0.1], [None, None], [0.0, 0.0]),
        ([], [0.5], []),
    ],
)
def test_gains_compare_with_the_graded_natural_mean(guided, natural, expected):
    assert guided_gains(guided, natural) == pytest.approx(expected)


def test_gains_are_clipped_from_above():
    assert guided_gains([1.0], [0.0], a_max=0.25) == [0.25]


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "First?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Second?"},
    {"role": "assistant", "content": "It is"},
]


def test_hint_goes_to_the_end_of_the_last_user_message_and_nothing_else_changes():
    guided = add_hint(CHAT, "HINT")
    assert guided[3]["content"] == "Second?\n\nHINT"
    assert [m for i, m in enumerate(guided) if i != 3] == [m for i, m in enumerate(CHAT) if i != 3]
    assert CHAT[3]["content"] == "Second?"
    with pytest.raises(ValueError, match="at least one user message"):
        add_hint(CHAT[:1], "HINT")


def test_prompt_joins_criteria_and_marks_negative_ones():
    rubric = Rubric([Criterion("mention {rain}.", 3), Criterion("says sorry", -2)])
    guided = guided_prompt(CHAT, rubric, [1, 0], template="Note: {hint}.")
    assert guided.messages[3]["content"] == "Second?\n\nNote: avoid: says sorry; mention {rain}."
    assert guided.shown == (1, 0)
    wish = guided_prompt(CHAT, rubric, [0], template="Note: {hint}.", secrecy_wish=True)
    assert "Do not mention these points" in wish.messages[3]["content"]


def test_budget_drops_the_lowest_priorities_first():
    def fits(limit):
        return lambda messages: len(messages[3]["content"]) <= limit

    rubric = Rubric([Criterion("x" * 10, 1), Criterion("y" * 10, 1), Criterion("z" * 10, 1)])
    full = len(guided_prompt(CHAT, rubric, [2, 0, 1], template="{hint}").messages[3]["content"])
    assert guided_prompt(CHAT, rubric, [2, 0, 1], template="{hint}", fits=fits(full)).shown == (2, 0, 1)
    assert guided_prompt(CHAT, rubric, [2, 0, 1], template="{hint}", fits=fits(full - 1)).shown == (2, 0)
    assert guided_prompt(CHAT, rubric, [2, 0, 1], template="{hint}", fits=fits(5)) is None


def test_templates_are_drawn_by_hash_and_all_come_up():
    drawn = [draw_template(TEMPLATES, seed=0, step=s, uid="q", index=j) for s in range(10) for j in range(8)]
    assert set(drawn) == set(TEMPLATES)
    assert drawn == [draw_template(TEMPLATES, seed=0, step=s, uid="q", index=j) for s in range(10) for j in range(8)]
    assert drawn != [draw_template(TEMPLATES, seed=1, step=s, uid="q", index=j) for s in range(10) for j in range(8)]


@pytest.mark.parametrize("size", range(2, 13))
@pytest.mark.parametrize("numerator, denominator", [(1, 5), (2, 5), (1, 10), (3, 10), (1, 3), (5, 7), (19, 30)])
def test_a_reward_equal_to_the_mean_has_no_gain_whatever_the_mean_rounds_to(size, numerator, denominator):
    flat = [numerator / denominator] * size
    halves = [numerator / (2 * denominator), 3 * numerator / (2 * denominator)] * size  # another way to the same mean
    assert guided_gains([flat[0], 1.0], flat) == [0.0, pytest.approx(1 - flat[0])]
    assert guided_gains([flat[0]], halves) == [0.0]
    assert guided_gains([flat[0] + 1e-6], flat) == [pytest.approx(1e-6, rel=1e-6)]


def test_priorities_that_are_equal_but_for_rounding_tie():
    rubric = Rubric((Criterion("a", 0.1), Criterion("b", 0.3)))
    verdicts = [["not_met", "met"], ["not_met", "met"], ["not_met", "not_met"]]  # 3 x 0.1 and 1 x 0.3
    assert select_feedback(rubric, verdicts, 1) == [1]
    assert select_feedback(Rubric(rubric.criteria[::-1]), [row[::-1] for row in verdicts], 1) == [0]
    three = Rubric((Criterion("a", 0.3), Criterion("b", 0.3), Criterion("c", 0.1)))
    assert select_feedback(three, [[1, 0, 0], [1, 1, 0], [1, 1, 0]], 3) == [1, 2]
