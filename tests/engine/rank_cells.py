"""What every rank of a launch does in test_data_parallel.py: `torchrun ... -m tests.engine.rank_cells MODEL FOLDER`.

All cells of one rank count in one launch. Rank 0 writes FOLDER/ranks-N.json; checkpoints of every ZeRO stage go to
FOLDER/ckpt-N-STAGE, and what other rank counts left there is read back.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from rise_engine import agreement
from rise_engine.checkpoint import CheckpointError, CheckpointStore
from rise_engine.config import EngineConfig
from rise_engine.policy import PolicyEngine
from rise_engine.sequences import TrainSequence
from rise_engine.sharding import share
from rise_engine.weights_stream import named_weights
from tests.engine.helpers import a_step
from tests.torchrun import end

KEYS = {"lr": 0.05, "eps": 1e-2, "warmup_steps": 0}
STAGES = (0, 1, 2, 3)
BUDGETS = (40, 90, 4096)
STEPS, SAVED_AFTER = 4, 2


def sequences(i: int) -> list[TrainSequence]:
    """Five prompts; guide rows under the first alone, so that every rank but one has none; one step has none at all."""
    step = a_step(i, prompts=5)
    kept = [s for s in step if not s.is_guide or (s.uid == "p0" and i != 1)]
    return [replace(s, uid=f"{s.uid}-{k}") if s.is_guide else s for k, s in enumerate(kept)]


def a_policy(model: str | Path, stage: int, budget: int = 90) -> PolicyEngine:
    return PolicyEngine(model, EngineConfig(zero_stage=stage, micro_batch_tokens=budget, **KEYS))


def train(policy: PolicyEngine, steps: range) -> list[list[float]]:
    found = []
    for i in steps:
        mine = share(
            sequences(i),
            rank=policy.rank,
            world_size=policy.world_size,
            budget=policy.config.micro_batch_tokens,
            layout=policy.layout,
        )
        s = policy.train_step(mine, temperature=0.7)
        found.append([s.loss, s.guide_loss, s.grad_norm, s.entropy, s.tokens, s.forwarded_sequences])
    return found


def weights(policy: PolicyEngine) -> list[float]:
    """A few values of every weight."""
    return [v for _, w in named_weights(policy) for v in w.flatten()[:: max(1, w.numel() // 7)].tolist()]


def digest(policy: PolicyEngine) -> str:
    text = b"".join(w.float().contiguous().numpy().tobytes() for _, w in named_weights(policy))
    return hashlib.sha256(text).hexdigest()


def cell(model: str | Path, stage: int, budget: int, store: Path | None = None) -> dict:
    policy = a_policy(model, stage, budget)
    losses = train(policy, range(SAVED_AFTER))
    if store is not None:
        CheckpointStore(store).save(policy)
    losses += train(policy, range(SAVED_AFTER, STEPS))
    return {"stage": stage, "budget": budget, "steps": losses, "weights": weights(policy), "digest": digest(policy)}


def resumed(model: str | Path, stage: int, store: Path) -> dict:
    policy = a_policy(model, stage)
    assert CheckpointStore(store).load_latest(policy)
    assert policy.step == SAVED_AFTER
    steps = train(policy, range(SAVED_AFTER, STEPS))
    return {"store": store.name, "steps": steps, "weights": weights(policy), "digest": digest(policy)}


def damaged(model: str | Path, store: Path) -> list[str]:
    """What every rank is told when the file of one rank has the right size and other bytes."""
    [file] = store.glob(f"step-*/rank-{agreement.world_size() - 1:05d}-000.safetensors")
    policy = a_policy(model, 2)
    if policy.rank == 0:
        file.write_bytes(b"\0" * file.stat().st_size)
    torch.distributed.barrier()
    try:
        CheckpointStore(store).load_latest(policy)
    except CheckpointError as error:
        told = f"{agreement.failed_rank(error) is not None} {error}"
    return agreement.gather(lambda: told)


def main(model: str, folder: Path) -> None:
    torch.set_num_threads(1)
    first = a_policy(model, 0)
    ranks = first.world_size
    record = {
        "cells": [
            cell(model, s, b, folder / f"ckpt-{ranks}-{s}" if b == 90 else None)
            for s in STAGES
            for b in (BUDGETS if s in (0, 2) else (90,))
        ],
        "resumed": [resumed(model, int(p.name[-1]), p) for p in sorted(folder.glob("ckpt-*"))],
        "damaged": damaged(model, folder / f"ckpt-{ranks}-2") if ranks == 3 else [],
    }
    if first.rank == 0:
        (folder / f"ranks-{ranks}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    end()
