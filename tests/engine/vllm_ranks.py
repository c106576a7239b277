"""Run by torchrun from test_vllm_ranks.py: what two ranks with a vLLM engine each must show."""

from __future__ import annotations

import json
import sys

import torch.distributed as dist

from rise_engine.parity import ParityError, parity_probe
from rise_engine.rollout.base import RolloutRequest, Sampling
from rise_engine.rollout.vllm import VllmRollout
from rise_engine.rollout.vllm_config import VllmConfig
from rise_engine.seeds import derive_seed
from tests.engine.helpers import a_step
from tests.engine.vllm_helpers import BESIDE_OTHERS, CONTEXT, a_policy, attach, gaps, some_requests
from tests.torchrun import end


def main(folders: list[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for folder in folders:
        rollouts = VllmRollout(a_policy(folder), context_length=CONTEXT, max_rows=8, config=BESIDE_OTHERS)
        for stage in (2, 3):
            policy = a_policy(folder, zero_stage=stage)
            attach(rollouts, policy).sync(0)
            parity_probe(rollouts, policy)
            policy.train_step(a_step(policy.rank), temperature=1.0)
            rollouts.sync(1)
            worst = gaps(rollouts)
            found[f"{folder} {stage}"] = [parity_probe(rollouts, policy), worst.max().item(), worst.mean().item()]

    # One rank's engine keeps the weights of the step before.
    policy.train_step(a_step(policy.rank + 2), temperature=1.0)
    rollouts.sync(2) if policy.rank == 0 else list(stream_only(rollouts))
    rollouts.weights.version = 2
    try:
        parity_probe(rollouts, policy)
    except ParityError as error:
        found["stale"] = [policy.rank, str(error)]
    rollouts.sync(2)
    parity_probe(rollouts, policy)

    # Each rank's own prompts, and then the same ones: what one rank samples, the other does not.
    mine = some_requests(seed=policy.rank)
    found["samples"] = [r.token_ids for r in rollouts.generate(mine, Sampling(12))]
    seeds = [derive_seed("natural", 0, 1, f"prompt-{policy.rank}", i) for i in range(4)]
    same = [RolloutRequest("same", i, tuple(range(10, 80)), seed) for i, seed in enumerate(seeds)]
    found["one prompt"] = [r.token_ids for r in rollouts.generate(same, Sampling(12))]
    return found


def stream_only(rollouts: VllmRollout):
    """A rank that takes part in the gathering and loads nothing."""
    from rise_engine.weights_stream import named_weights

    yield from named_weights(rollouts.policy)


def shared(folder: str) -> dict[str, object]:
    """Both ranks hold one model together and answer for each other."""
    policy = a_policy(folder, zero_stage=2)
    rollouts = VllmRollout(policy, context_length=CONTEXT, max_rows=8, config=VllmConfig(tensor_parallel_size=2))
    rollouts.sync(0)
    parity_probe(rollouts, policy)
    policy.train_step(a_step(policy.rank), temperature=1.0)
    rollouts.sync(1)
    mine = some_requests(count=2 + policy.rank, seed=policy.rank)
    answers = rollouts.generate(mine, Sampling(12))
    assert [(r.uid, r.index) for r in answers] == [(r.uid, r.index) for r in mine]
    return {"shared": [parity_probe(rollouts, policy), len(answers)]}


if __name__ == "__main__":
    which, *folders = sys.argv[1:]
    result = main(folders) if which == "each" else shared(folders[0])
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, result)
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(everyone), flush=True)
    end()
