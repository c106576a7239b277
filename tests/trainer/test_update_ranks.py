"""Two ranks learn from a rollout batch as one does: mini-batches, old and reference log-probs, sequence correction."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from rise_engine.config import EngineConfig
from rise_engine.policy import PolicyEngine
from rise_engine.reference import FrozenReference
from rise_kernels.token_losses import LossSpec
from rise_rl.update import update
from tests.engine.helpers import a_step
from tests.tiny import make_tiny
from tests.torchrun import results, torchrun

ROOT = Path(__file__).parents[2]
# An epsilon that makes Adam's first steps proportional to the gradient: weights compare gradients, not their signs.
KEYS = {"lr": 0.1, "eps": 1e-2, "warmup_steps": 0, "micro_batch_tokens": 45}
VARYING = ("seconds", "micro_batches", "forwarded_sequences")

SCRIPT = """
import json, sys
import torch
from tests.trainer.test_update_ranks import learn
torch.set_num_threads(1)
for stage in (1, 3):
    found = learn(sys.argv[1], sys.argv[2], stage)
    if torch.distributed.get_rank() == 0:
        print("RESULT", json.dumps(found), flush=True)
"""


def mini_batches():
    """Three; the second has a single sequence, so that one rank has nothing to do."""
    g = torch.Generator().manual_seed(3)

    def near(s):
        return s if s.is_guide else replace(s, behaviour_logprob=(-6 + torch.randn(len(s.response_ids), generator=g)))

    batches = [a_step(0, prompts=2), a_step(1, prompts=1)[:1], a_step(2, prompts=2)]
    return [[near(s) for s in batch] for batch in batches]


def learn(folder: str, other: str, stage: int) -> dict:
    policy = PolicyEngine(folder, EngineConfig(zero_stage=stage, **KEYS), loss=LossSpec(kl_coef=0.2))
    reference = FrozenReference(other, policy)
    stats = update(policy, mini_batches(), temperature=0.7, reference=reference, sequence_cap=2.0)
    [after] = policy.logprobs((5, 6, 7), [(8, 9, 10)], temperature=1.0)
    policy.score(a_step(4) if policy.rank == 0 else [], temperature=1.0)  # a rank with nothing at all keeps step
    return {k: v for k, v in asdict(stats).items() if k not in VARYING} | {"after": after.tolist()}


@pytest.mark.slow
def test_two_ranks_equal_one(tiny_folder, tmp_path):
    other = make_tiny(tmp_path / "other", "qwen3-tied", seed=5)
    expected = learn(str(tiny_folder), str(other), 0)
    assert 0 < expected["importance_kept"] < 1
    assert expected["kl"] > 0
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    stages = results(torchrun(script, tiny_folder, other))
    assert len(stages) == 2
    for found in stages:
        assert found == {name: pytest.approx(value, rel=2e-4, abs=1e-4) for name, value in expected.items()}
