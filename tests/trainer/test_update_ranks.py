"""Two ranks learn from a rollout batch as one does: mini-batches, old and reference log-probs, sequence correction."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from rise_engine import agreement
from rise_engine.config import EngineConfig
from rise_engine.policy import PolicyEngine
from rise_engine.reference import FrozenReference
from rise_kernels.token_losses import LossSpec
from rise_rl.update import my_share, update
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
from tests.torchrun import end
from tests.trainer.test_update_ranks import learn
torch.set_num_threads(1)
for stage in (1, 3):
    found = learn(sys.argv[1], sys.argv[2], stage)
    if torch.distributed.get_rank() == 0:
        print("RESULT", json.dumps(found), flush=True)
end()
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


# --- what goes wrong on one rank -------------------------------------------------------------------------------------

ONE_RANK_FAILS = """
import json, sys
import torch
from rise_engine import agreement
from tests.torchrun import end
from tests.trainer.test_update_ranks import faults
torch.set_num_threads(1)
found = faults(sys.argv[1], sys.argv[2])
for told in agreement.gather(lambda: found):  # one rank prints: lines of two get mixed
    if torch.distributed.get_rank() == 0:
        print("RESULT", json.dumps(told), flush=True)
end()
"""


def faults(folder: str, gone: str) -> list[tuple[str, int | None, str]]:
    """(what, the rank it comes from, what this rank was told) of failures on rank 1 alone, each before a collective
    operation that rank 0 is waiting in. A hang ends after a minute, with another message.
    """
    config = EngineConfig(zero_stage=2, timeout_minutes=1, **KEYS)
    policy = PolicyEngine(folder, config, loss=LossSpec(kl_coef=0.2))
    reference = FrozenReference(folder, policy)
    second = policy.rank == 1
    found: list[tuple[str, int | None, str]] = []

    def told(what, work):
        try:
            work()
        except Exception as error:
            found.append((what, agreement.failed_rank(error), f"{type(error).__name__}: {error}"))

    def step(change):
        """A step in which the sequences of rank 1, and no others, are changed."""
        whole = [replace(s, behaviour_logprob=(-5.0,) * len(s.response_ids)) for s in a_step(prompts=2)]
        shares = agreement.gather(lambda: [s.response_ids for s in my_share(whole, policy)])
        return [change(s) if s.response_ids in shares[1] else s for s in whole]

    def unknown(s):
        return replace(s, response_ids=(*s.response_ids[:-1], 384))

    bad = [unknown(s) for s in a_step() if not s.is_guide]
    long = [replace(s, prompt_ids=s.prompt_ids * 200) for s in a_step()]
    mine = bad if second else [s for s in a_step() if not s.is_guide]
    without = step(lambda s: s if s.is_guide else replace(s, behaviour_logprob=None))
    update_of = {"reference": reference, "temperature": 0.7}
    told("correction", lambda: update(policy, [without], sequence_cap=2.0, **update_of))
    told("old", lambda: update(policy, [a_step(), step(unknown)], **update_of))
    told("reference", lambda: update(policy, [step(unknown)], **update_of))
    told(
        "train_step",
        lambda: policy.train_step([replace(s, ref_logprob=[0.0] * len(s.response_ids)) for s in mine], temperature=0.7),
    )
    told("score", lambda: policy.score(long if second else a_step(), temperature=0.7))
    told("load", lambda: PolicyEngine(gone if second else folder, config))
    told("load reference", lambda: FrozenReference(gone if second else folder, policy))
    assert policy.step == 0
    update(policy, [a_step()], **update_of)  # and they can go on together
    return [*found, ("step", None, str(policy.step))]


@pytest.mark.slow
def test_what_fails_on_one_rank_is_raised_on_both(tiny_folder, tmp_path):
    script, gone = tmp_path / "faults.py", tmp_path / "gone"
    script.write_text(ONE_RANK_FAILS)
    first, second = results(torchrun(script, tiny_folder, gone))
    assert first == second
    token = "response_ids: found token 384, but the model has tokens 0 to 383"
    assert [what for what, *_ in first] == [
        "correction", "old", "reference", "train_step", "score", "load", "load reference", "step"
    ]  # fmt: skip
    assert {rank for _, rank, _ in first[:-1]} == {1}
    said = {what: text for what, _, text in first}
    assert said["correction"].startswith("ValueError: behaviour_logprob: sequence 'p")
    assert said["old"] == said["reference"] == said["train_step"] == f"ValueError: {token}"
    assert said["score"] == "ValueError: sequence of 809 tokens: the model's context is 512"
    assert said["load"].startswith("OSError: tokenizer: ")
    assert said["load reference"].startswith("OSError: model: ")
    assert all(str(gone) in said[what] for what in ("load", "load reference"))
    assert said["step"] == "1"
