"""Checkpoints of offloaded and of LoRA runs travel between one rank and two, and between their stages: what is read is
what was saved to the last bit, and the run goes on with the numbers of the one that was never interrupted.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.engine.checkpoint_cells import CELLS, FAMILIES, SAVED_AFTER, cell, content, resumed
from tests.engine.test_data_parallel import CLOSE, agree
from tests.tiny import make_tiny
from tests.torchrun import torchrun


@pytest.mark.slow
def test_offloaded_and_lora_checkpoints_travel(tiny_folder, tmp_path):
    model, other = tiny_folder("qwen3-tied"), make_tiny(tmp_path / "other", "qwen3-tied", seed=1)
    alone = {name: cell(model, name, tmp_path) for name in CELLS}
    torchrun("-m", "tests.engine.checkpoint_cells", model, other, tmp_path)
    two = json.loads((tmp_path / "2.json").read_text())

    for name in CELLS:
        assert two["from-2"][name]["steps"] == two["cells"][name]["steps"][SAVED_AFTER:], name
        assert two["from-2"][name]["digest"] == two["cells"][name]["digest"], name
    for family in FAMILIES:
        names = list(family)
        expected = alone[names[0]]
        # bfloat16 rounds each pass: its numbers are those of the same weights, to its precision.
        close = CLOSE if "bf16" not in names[0] else {"rel": 0.02, "abs": 0.02}
        for name, following in zip(names, [*names[1:], names[0]]):
            here = resumed(model, name, tmp_path / f"2-{name}")
            crossed = resumed(model, following, tmp_path / f"2-{name}")
            for found, steps in [
                (alone[name], expected["steps"]),
                (two["cells"][name], expected["steps"]),
                *((r, expected["steps"][SAVED_AFTER:]) for r in (two["from-1"][name], here, crossed)),
            ]:
                agree(found["steps"], steps, name, close)
                assert found["weights"] == pytest.approx(expected["weights"], abs=max(2e-4, close["abs"])), name

    reads = list(tmp_path.glob("*-read-by-*"))
    assert len(reads) == 4 * len(CELLS) - sum(len(f) == 1 for f in FAMILIES)  # the family of one crosses to itself
    for read in reads:
        saved, again = content(tmp_path / read.name.partition("-read-by-")[0]), content(read)
        assert saved.keys() == again.keys()
        assert all(torch.equal(saved[key], again[key]) for key in saved), read.name
        assert {int(n) for key, n in saved.items() if key.startswith("updates/")} == {SAVED_AFTER}

    assert len(set(two["refused"])) == 1
    assert two["refused"][0].startswith(f"0 {tmp_path / '1-lora-3'}")
    assert f"its frozen base of the adapters is {model} with weights" in two["refused"][0]
