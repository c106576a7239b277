"""Each sequence goes to exactly one rank, every rank agrees about it, and no rank gets much more than the mean."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rise_engine.sequences import TrainSequence
from rise_engine.sharding import share
from tests.engine.helpers import a_step

groups = st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(1, 80), min_size=1, max_size=6)), max_size=12)
shapes = {"budget": st.integers(1, 400), "layout": st.sampled_from(["shared_prompt", "padded"])}


def sequences_of(groups) -> list[TrainSequence]:
    """One prompt a group; every response is told apart by its uid."""
    rows = [
        TrainSequence(f"{k}/{i}", (k + 1,) * prompt, (7,) * length, 1.0)
        for k, (prompt, lengths) in enumerate(groups)
        for i, length in enumerate(lengths)
    ]
    return rows[::2] + rows[1::2]  # members of a group need not be neighbours


def packed(part, budget: int, layout: str) -> tuple[int, int]:
    """Tokens of a rank's part and of the longest piece that cannot be split, prompts of a group counted once where its
    responses fit the budget together. Worked out here from the definition: first fit, longest first.
    """
    if layout == "padded":
        sizes = [s.length for s in part]
        return sum(sizes), max(sizes, default=0)
    total, longest = 0, 0
    for prompt in {s.prompt_ids for s in part}:
        bins: list[int] = []
        for length in sorted((len(s.response_ids) for s in part if s.prompt_ids == prompt), reverse=True):
            fitting = [b for b, size in enumerate(bins) if len(prompt) + size + length <= budget]
            if fitting:
                bins[fitting[0]] += length
            else:
                bins.append(length)
        total += sum(len(prompt) + size for size in bins)
        longest = max(longest, *(len(prompt) + size for size in bins))
    return total, longest


@settings(max_examples=150, deadline=None)
@given(groups=groups, ranks=st.integers(1, 6), **shapes)
def test_every_sequence_has_one_rank_and_no_rank_gets_much_more_than_the_mean(groups, ranks, budget, layout):
    sequences = sequences_of(groups)
    parts = [share(sequences, rank=r, world_size=ranks, budget=budget, layout=layout) for r in range(ranks)]
    assert Counter(s.uid for part in parts for s in part) == Counter(s.uid for s in sequences)
    for part in parts:
        assert part == [s for s in sequences if s in part]  # in their order
    total, longest = packed(sequences, budget, layout)
    loads = [packed(part, budget, layout)[0] for part in parts]
    assert max(loads) <= total / ranks + (1 - 1 / ranks) * longest + 1e-9
    assert sum(loads) <= total  # a prompt is not computed more often than on one rank


@settings(max_examples=100, deadline=None)
@given(groups=groups, ranks=st.integers(1, 6))
def test_a_group_that_fits_the_budget_stays_whole(groups, ranks):
    sequences = sequences_of(groups)
    budget = max((s.length for s in sequences), default=1) * 6
    for rank in range(ranks):
        part = share(sequences, rank=rank, world_size=ranks, budget=budget, layout="shared_prompt")
        prompts = {s.prompt_ids for s in part}
        assert len(part) == sum(s.prompt_ids in prompts for s in sequences)


def test_long_and_short_groups_are_balanced():
    sequences = [TrainSequence(f"{n}", (n,) * 10, (7,) * n, 1.0) for n in (90, 10, 20, 80, 50, 60, 30, 70)]
    halves = [share(sequences, rank=r, world_size=2, budget=200, layout="shared_prompt") for r in range(2)]
    assert [sum(s.length for s in half) for half in halves] == [250, 240]
    # 90 -> 0, 80 -> 1, 70 -> 1, 60 -> 0, 50 -> 0 (equal loads), 30 -> 1, 20 -> 1, 10 -> 0
    assert [[s.uid for s in half] for half in halves] == [["90", "10", "50", "60"], ["20", "80", "30", "70"]]


def test_one_rank_gets_everything_in_order_and_more_ranks_than_work_leaves_some_idle():
    step = a_step()
    assert share(step, rank=0, world_size=1, budget=64, layout="shared_prompt") == step
    assert share(step, rank=4, world_size=5, budget=10_000, layout="shared_prompt") == []


def test_a_rank_outside_the_group_is_refused():
    with pytest.raises(ValueError, match="rank: expected 0 to 1, found 2"):
        share(a_step(), rank=2, world_size=2, budget=64, layout="padded")
