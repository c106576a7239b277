"""What every rank of the launch in test_checkpoint_ranks.py does: `torchrun ... -m tests.engine.checkpoint_cells MODEL
OTHER FOLDER`. Each cell trains, saves half way into FOLDER/RANKS-NAME and goes on, then goes on again from what one
rank saved and from its own. Rank 0 writes FOLDER/2.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open

from rise_engine import agreement
from rise_engine.checkpoint import CheckpointError, CheckpointStore
from rise_engine.config import EngineConfig
from rise_engine.distributed import seed_everything
from rise_engine.policy import PolicyEngine
from tests.engine.rank_cells import KEYS, SAVED_AFTER, STEPS, digest, train, weights
from tests.torchrun import end

BOTH = {"optimizer": True, "parameters": True}
LORA = {"rank": 4, "alpha": 8}
FAMILIES = (
    {
        "optimizer-2": {"zero_stage": 2, "offload": {"optimizer": True}},
        "both-3": {"zero_stage": 3, "offload": BOTH},
    },
    {"both-3-bf16": {"zero_stage": 3, "dtype": "bfloat16", "offload": BOTH}},
    {
        "lora-0": {"zero_stage": 0, "lora": LORA},
        "lora-2-optimizer": {"zero_stage": 2, "lora": LORA, "offload": {"optimizer": True}},
        "lora-3": {"zero_stage": 3, "lora": LORA},
    },
)
"""Cells of one family go on from each other's checkpoints."""

CELLS = {name: keys for family in FAMILIES for name, keys in family.items()}


def a_policy(model: str | Path, name: str) -> PolicyEngine:
    seed_everything(0)  # adapters begin at random
    return PolicyEngine(model, EngineConfig(micro_batch_tokens=90, **KEYS | CELLS[name]))


def cell(model: str | Path, name: str, folder: Path) -> dict:
    policy = a_policy(model, name)
    steps = train(policy, range(SAVED_AFTER))
    CheckpointStore(folder / f"{policy.world_size}-{name}").save(policy)
    steps += train(policy, range(SAVED_AFTER, STEPS))
    return {"steps": steps, "weights": weights(policy), "digest": digest(policy)}


def resumed(model: str | Path, name: str, store: Path) -> dict:
    """Goes on from the checkpoint in `store`, once it has been saved as it was read."""
    policy = a_policy(model, name)
    assert CheckpointStore(store).load_latest(policy)
    assert policy.step == SAVED_AFTER
    CheckpointStore(store.with_name(f"{store.name}-read-by-{policy.world_size}-{name}")).save(policy)
    steps = train(policy, range(SAVED_AFTER, STEPS))
    return {"steps": steps, "weights": weights(policy), "digest": digest(policy)}


def content(store: Path) -> dict[str, torch.Tensor]:
    """Every saved weight and moment, put together again from the ranks' files, and how often Adam updated it."""
    [folder] = store.glob("step-*")
    found = {}
    for name, entry in json.loads((folder / "checkpoint.json").read_text())["parameters"].items():
        found[f"updates/{name}"] = torch.tensor(entry["updates"])
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            whole = torch.full((torch.Size(entry["shape"]).numel(),), float("nan"))
            for file, start, n in entry["parts"]:
                with safe_open(folder / file, framework="pt") as part:
                    whole[start : start + n] = part.get_tensor(f"{kind}/{name}")
            found[f"{kind}/{name}"] = whole
    return found


def refused(other: str, store: Path) -> list[str]:
    """What every rank is told where the adapters' base is another model."""
    try:
        CheckpointStore(store).load_latest(a_policy(other, "lora-3"))
        told = "nothing"
    except CheckpointError as error:
        told = f"{agreement.failed_rank(error)} {error}"
    return agreement.gather(lambda: told)


def main(model: str, other: str, folder: Path) -> None:
    torch.set_num_threads(1)
    record = {"cells": {name: cell(model, name, folder) for name in CELLS}}
    for ranks in (1, 2):
        record[f"from-{ranks}"] = {name: resumed(model, name, folder / f"{ranks}-{name}") for name in CELLS}
    told = refused(other, folder / "1-lora-3")
    if agreement.rank() == 0:
        (folder / "2.json").write_text(json.dumps(record | {"refused": told}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    end()
