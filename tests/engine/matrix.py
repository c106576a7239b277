"""One rank of tests/engine/test_matrix.py: trains the cells one after another and, on rank 0, writes what came out.

Usage: matrix.py OUT FOLDER_TIED FOLDER_UNTIED CELL..., where a cell is a JSON object of engine keys and "tied"; with
"native" the stage runs as asked for, also where the engine would run another.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from deepspeed.utils import safe_get_full_fp32_param

from rise_engine.config import EngineConfig
from rise_engine.policy import PolicyEngine
from rise_engine.sequences import TrainSequence
from tests.engine.helpers import a_step
from tests.torchrun import end

T = 0.7
# A large epsilon keeps Adam's first steps proportional to the gradient, so that weights compare gradients, not signs.
KEYS = {"lr": 0.1, "eps": 1e-2, "warmup_steps": 2, "weight_decay": 0.1, "clip_norm": 1.0, "micro_batch_tokens": 45}


def training_steps() -> list[list[TrainSequence]]:
    """Three steps. In the first, one sequence weighs 500 times as much as each of 30 others, every one of which fills a
    micro-batch: added up in bfloat16, the others would vanish beside it.
    """
    prompt, answer = (5, 6, 7, 8), tuple(range(20, 60))
    heavy = TrainSequence("heavy", prompt, answer, 0.02, 1.0)
    light = replace(heavy, uid="light", token_weight=heavy.token_weight / 500)
    return [[heavy, *[light] * 30], a_step(0), a_step(1)]


def share_of(step: int, rank: int, ranks: int) -> list[TrainSequence]:
    """Uneven on purpose: first everybody has some, then the last rank has one natural sequence and the first the rest,
    then the first has all.
    """
    sequences = training_steps()[step]
    if step == 0:
        return sequences[rank::ranks]
    last = sequences[:1] if step == 1 and ranks > 1 else []
    return sequences[len(last) :] if rank == 0 else last if rank == ranks - 1 else []


def full_weights(policy: PolicyEngine) -> dict[str, torch.Tensor]:
    """The float32 weights that the optimizer moves, whole, on every rank."""
    if policy.engine.zero_optimization_stage() == 0:
        return {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    return {name: safe_get_full_fp32_param(p).clone() for name, p in policy.model.named_parameters() if p.requires_grad}


class NativeStage(EngineConfig):
    @property
    def effective_zero_stage(self) -> int:
        return self.zero_stage


def train(folder: str, keys: dict) -> dict:
    config = NativeStage if keys.get("native") else EngineConfig
    policy = PolicyEngine(folder, config(**KEYS | {k: v for k, v in keys.items() if k not in ("tied", "native")}))
    before = full_weights(policy)
    stats = [
        policy.train_step(share_of(step, policy.rank, policy.world_size), temperature=T)
        for step in range(len(training_steps()))
    ]
    head, embedding = policy.model.get_output_embeddings(), policy.model.get_input_embeddings()
    return {
        "before": before,
        "after": full_weights(policy),
        "stats": [(s.loss, s.grad_norm, s.lr, s.micro_batches) for s in stats],
        "stage": policy.engine.zero_optimization_stage(),
        "ranks": policy.world_size,
        "tied": head.weight is embedding.weight,
        "optimizer": type(policy.engine.optimizer).__name__,
        "float32_gradients": sum(g.numel() for g in getattr(policy.engine.optimizer, "fp32_groups_gradients_flat", ())),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, tied, untied = sys.argv[1:4]
    for text in sys.argv[4:]:
        keys = json.loads(text)
        found = train(tied if keys["tied"] else untied, keys)
        if torch.distributed.get_rank() == 0:
            torch.save(found, Path(out) / f"{len(list(Path(out).glob('*.pt'))):03d}.pt")
    end()
