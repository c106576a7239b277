"""Two ranks, each with a vLLM engine of its own, or with one between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_tiny
from tests.torchrun import results, torchrun

ROOT = Path(__file__).parents[2]


def launch(*arguments: str) -> list[dict]:
    [found] = results(torchrun("-m", "tests.engine.vllm_ranks", *arguments))
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    pytest.importorskip("vllm")
    kinds = ("llama-tied", "qwen3")
    return [str(make_tiny(tmp_path_factory.mktemp("ranks") / k, k, head_dim=32, scale=6.0)) for k in kinds]


@pytest.mark.slow
def test_every_rank_samples_with_the_trainers_weights_and_a_stale_rank_is_named(folders):
    found = launch("each", *folders)
    for mine in found:
        for folder in folders:
            for stage in (2, 3):
                probed, largest, average = mine[f"{folder} {stage}"]
                assert probed <= 1e-3
                assert largest <= 1e-3
                assert average <= 1e-4
    for rank, mine in enumerate(found):
        told_by, message = mine["stale"]
        assert told_by == rank  # the same error on both, so that neither waits for the other
        assert "the rollout engine of rank 1 and the trainer differ by " in message
        assert "rank 0 " not in message
        assert "weight sync" in message
    for kind in ("samples", "one prompt"):
        first, second = ({tuple(tokens) for tokens in mine[kind]} for mine in found)
        assert first
        assert not first & second


@pytest.mark.slow
def test_ranks_that_hold_one_model_together_answer_for_each_other(folders):
    for rank, mine in enumerate(launch("shared", folders[1])):
        probed, count = mine["shared"]
        assert probed <= 1e-3
        assert count == 3 * (2 + rank)
