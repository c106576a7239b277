"""1, 2 and 3 ranks and every micro-batch budget learn the same from the same recorded answers, and any of them goes on
from what any other saved.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rise_engine.checkpoint import CheckpointStore
from tests.engine import rank_cells
from tests.engine.helpers import plain_model, plain_steps
from tests.engine.rank_cells import BUDGETS, KEYS, SAVED_AFTER, STAGES, STEPS, a_policy, cell, resumed
from tests.torchrun import torchrun

ROOT = Path(__file__).parents[2]
CLOSE = {"rel": 2e-4, "abs": 2e-5}
"""Float32 sums of a few hundred terms in another order, through four updates at a rate of 0.05."""


def launch(ranks: int, model: Path, folder: Path) -> dict:
    torchrun("-m", "tests.engine.rank_cells", model, folder, ranks=ranks)
    return json.loads((folder / f"ranks-{ranks}.json").read_text())


def agree(found: list[list[float]], expected: list[list[float]], what: object, close: dict = CLOSE) -> None:
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == pytest.approx(theirs, **close), (what, step)


@pytest.mark.slow
def test_rank_count_and_budget_change_nothing_and_checkpoints_travel(tiny_folder, tmp_path):
    model = tiny_folder("qwen3-tied")
    alone = [cell(model, s, 90, tmp_path / f"ckpt-1-{s}") for s in STAGES]
    alone += [cell(model, 0, b) for b in BUDGETS if b != 90]
    expected = alone[0]
    by_ranks = {2: launch(2, model, tmp_path), 3: launch(3, model, tmp_path)}

    plain = plain_model(model)
    steps = [rank_cells.sequences(i) for i in range(STEPS)]
    record = plain_steps(plain, steps, t=0.7, lr=KEYS["lr"], eps=KEYS["eps"], clip=1.0)
    for (loss, norm), found in zip(record, expected["steps"]):
        assert [found[0], found[2]] == pytest.approx([loss, norm], **CLOSE)

    for found in [*alone, *by_ranks[2]["cells"], *by_ranks[3]["cells"]]:
        agree(found["steps"], expected["steps"], found["stage"])
        assert found["weights"] == pytest.approx(expected["weights"], abs=2e-4), (found["stage"], found["budget"])

    # Every stage on 2 and 3 ranks goes on from 1 rank's checkpoint, from its own, and 3 from 2's.
    for ranks, record in by_ranks.items():
        same = {f"ckpt-{ranks}-{c['stage']}": c for c in record["cells"] if c["budget"] == 90}
        assert len(record["resumed"]) == len(STAGES) * ranks
        for found in record["resumed"]:
            agree(found["steps"], expected["steps"][SAVED_AFTER:], found["store"])
            if found["store"] in same:  # the same number of ranks: to the last bit
                assert found["steps"] == same[found["store"]]["steps"][SAVED_AFTER:]
                assert found["digest"] == same[found["store"]]["digest"]

    # One process goes on from 2 and 3 ranks' and exports what they had.
    for store in [*sorted(tmp_path.glob("ckpt-2-*")), tmp_path / "ckpt-3-3"]:
        agree(resumed(model, int(store.name[-1]), store)["steps"], expected["steps"][SAVED_AFTER:], store.name)
    one, two = (a_policy(model, 0) for _ in range(2))
    CheckpointStore(tmp_path / "ckpt-1-0").load_latest(one)
    CheckpointStore(tmp_path / "ckpt-3-3").load_latest(two)
    for (name, ours), theirs in zip(one.model.named_parameters(), two.model.parameters()):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0, msg=name)

    assert len(by_ranks[3]["damaged"]) == 3
    for told in by_ranks[3]["damaged"]:
        assert told.startswith("True ")
        assert "cannot be read" in told
