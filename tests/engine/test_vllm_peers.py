"""Ranks that hold one model together hear of each other's failures, instead of waiting for requests that never come."""

from __future__ import annotations

import pytest

from tests.torchrun import ROOT, results, torchrun


@pytest.mark.slow
def test_a_rank_that_fails_between_two_calls_ends_its_peers():
    [found] = results(torchrun(ROOT / "tests" / "engine" / "peers.py", timeout=300))
    everyone = ["of 0", "of 1", "of 1"]
    assert found == [
        [everyone, ["of 0"], 1, "rubric.txt is gone", False],
        [everyone, ["of 1", "of 1"], 1, "rubric.txt is gone", True],  # its own, to be told with its traceback
    ]
