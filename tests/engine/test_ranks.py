"""Two ranks with unequal work do what one rank does with all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rise_engine.config import EngineConfig
from rise_engine.policy import PolicyEngine
from tests.engine.helpers import a_step
from tests.torchrun import results, torchrun

ROOT = Path(__file__).parents[2]
KEYS = {"lr": 0.1, "eps": 1e-2, "warmup_steps": 0, "micro_batch_tokens": 45}

SCRIPT = """
import json, sys
import torch
from rise_engine.config import EngineConfig
from rise_engine.policy import PolicyEngine
from tests.engine.helpers import a_step
from tests.engine.test_ranks import KEYS, record
from tests.torchrun import end
torch.set_num_threads(1)
for stage in (0, 1, 2, 3):
    policy = PolicyEngine(sys.argv[1], EngineConfig(zero_stage=stage, **KEYS))
    # Rank 1 has one natural sequence and no guided one, then nothing at all.
    first, second = a_step(0), a_step(1)
    shares = [(first[1:], first[:1])[policy.rank], (second, [])[policy.rank]]
    found = record(policy, shares)
    if policy.rank == 0:
        print("RESULT", json.dumps(found), flush=True)
end()
"""


def record(policy: PolicyEngine, shares) -> list[list[float]]:
    steps = [policy.train_step(share, temperature=0.7) for share in shares]
    [after] = policy.logprobs((5, 6, 7), [(8, 9, 10)], temperature=1.0)
    return [*([s.loss, s.grad_norm, s.entropy, s.mean_support, s.tokens] for s in steps), after.tolist()]


@pytest.mark.slow
def test_two_ranks_equal_one_under_every_stage(tiny_folder, tmp_path):
    folder = tiny_folder("qwen3-tied")
    expected = record(PolicyEngine(folder, EngineConfig(**KEYS)), [a_step(0), a_step(1)])
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    stages = results(torchrun(script, folder))
    assert len(stages) == 4
    for found in stages:
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-4, abs=1e-4)
