import pytest
from hypothesis import given
from hypothesis import strategies as st

from rise_rl.weights import StepWeights

LENGTHS = st.lists(st.integers(1, 9000), min_size=1, max_size=40)


@given(LENGTHS)
def test_token_mean_weights_sum_to_one_over_all_tokens(lengths):
    w = StepWeights(lengths, prompts=3, guide_coefficient=0.05)
    assert sum(w.natural(n) * n for n in lengths) == pytest.approx(1)
    assert len({w.natural(n) for n in lengths}) == 1


@given(LENGTHS)
def test_sequence_mean_gives_every_sequence_the_same_share(lengths):
    w = StepWeights(lengths, prompts=3, guide_coefficient=0.05, aggregation="seq-mean-token-mean")
    assert [w.natural(n) * n for n in lengths] == pytest.approx([1 / len(lengths)] * len(lengths))


@given(LENGTHS)
def test_sum_norm_divides_by_a_constant(lengths):
    w = StepWeights(lengths, prompts=3, guide_coefficient=0.05, aggregation="seq-mean-token-sum-norm", norm_length=8192)
    assert sum(w.natural(n) * n for n in lengths) == pytest.approx(sum(lengths) / 8192 / len(lengths))


def test_guide_weights_are_equation_11_times_lambda():
    # two prompts; the first keeps two guided answers, the second none but still counts
    w = StepWeights([10, 20], prompts=2, guide_coefficient=0.05)
    gains, lengths = [0.3, 0.6], [5, 8]
    total = sum(w.guided(g, n, kept=2) * n for g, n in zip(gains, lengths))
    assert total == pytest.approx(0.05 * (0.3 + 0.6) / 2 / 2)


def test_bad_counts_are_refused():
    with pytest.raises(ValueError, match="at least 1 token"):
        StepWeights([3, 0], prompts=1, guide_coefficient=0)
    with pytest.raises(ValueError, match="prompts: expected at least 1"):
        StepWeights([3], prompts=0, guide_coefficient=0)
    with pytest.raises(ValueError, match="norm_length"):
        StepWeights([3], prompts=1, guide_coefficient=0, aggregation="seq-mean-token-sum-norm")
