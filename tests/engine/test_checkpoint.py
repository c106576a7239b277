"""Checkpoints resume exactly, are whole or absent, and refuse to be something they are not."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rise_engine.checkpoint import CheckpointError, CheckpointStore
from rise_engine.config import EngineConfig
from rise_engine.files import new_folder, recover
from rise_engine.policy import PolicyEngine
from rise_kernels.token_losses import LossSpec
from tests.engine.helpers import a_step
from tests.tiny import KINDS, make_tiny

ROOT = Path(__file__).parents[2]


def engine(folder, **keys) -> PolicyEngine:
    return PolicyEngine(folder, EngineConfig(**{"lr": 1e-2, "warmup_steps": 5, **keys}))


def train(policy: PolicyEngine, steps: range) -> list[tuple[float, float, float]]:
    return [(s.loss, s.grad_norm, s.lr) for s in (policy.train_step(a_step(i), temperature=1.0) for i in steps)]


# --- exact resume ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3-tied", "llama"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resuming_gives_the_same_numbers_to_the_last_bit(tiny_folder, tmp_path, kind, stage):
    whole = engine(tiny_folder(kind), zero_stage=stage)
    expected = train(whole, range(6))
    first = engine(tiny_folder(kind), zero_stage=stage)
    assert train(first, range(3)) == expected[:3]
    CheckpointStore(tmp_path).save(first)
    second = engine(tiny_folder(kind), zero_stage=stage)
    assert CheckpointStore(tmp_path).load_latest(second)
    assert second.step == 3
    assert train(second, range(3, 5)) == expected[3:5]
    CheckpointStore(tmp_path).save(second)
    third = engine(tiny_folder(kind), zero_stage=stage)
    CheckpointStore(tmp_path).load_latest(third)
    assert train(third, range(5, 6)) == expected[5:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_zero_stage_goes_on_with_the_same_numbers(tiny_folder, tmp_path, dtype):
    """Masters and moments are the same to the last bit, the sums of a step are added up in another order."""
    stages = (0, 1, 2, 3) if dtype == "float32" else (2, 3)
    first = engine(tiny_folder("qwen3-tied"), zero_stage=stages[-1], dtype=dtype)
    train(first, range(2))
    CheckpointStore(tmp_path).save(first)
    expected = train(first, range(2, 4))
    for stage in stages:
        other = engine(tiny_folder("qwen3-tied"), zero_stage=stage, dtype=dtype)
        CheckpointStore(tmp_path).load_latest(other)
        for ours, theirs in zip(train(other, range(2, 4)), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def draws() -> tuple[float, float, list[float]]:
    return random.random(), numpy.random.random(), torch.rand(3).tolist()


def test_what_a_file_of_the_random_state_says_is_not_run(tiny_folder, tmp_path):
    class Planted:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "planted"),)

    policy = engine(tiny_folder("qwen3-tied"))
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(policy)
    [rng] = (tmp_path / "checkpoints").rglob("rng-00000.pt")
    torch.save({"python": Planted()}, rng)
    index = rng.with_name("checkpoint.json")
    described = json.loads(index.read_text())
    described["files"][rng.name] = rng.stat().st_size
    index.write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.load_latest(policy)
    assert not (tmp_path / "planted").exists()


def test_random_state_and_skip_count_come_back(tiny_folder, tmp_path):
    policy = engine(tiny_folder("qwen3-tied"))
    policy.train_step([], temperature=1.0)
    draws()  # away from where a new engine's seed would start
    CheckpointStore(tmp_path).save(policy)
    drawn = draws()
    other = engine(tiny_folder("qwen3-tied"))
    CheckpointStore(tmp_path).load_latest(other)
    assert draws() == drawn
    assert (other.step, other.skipped) == (1, 1)


# --- the store -------------------------------------------------------------------------------------------------------


def test_the_last_k_are_kept_and_the_highest_step_is_the_latest(tiny_folder, tmp_path):
    policy, store = engine(tiny_folder("qwen3-tied")), CheckpointStore(tmp_path, keep=2)
    assert store.latest() is None
    assert not store.load_latest(policy)
    for step in (8, 9, 10):
        policy.step = step
        store.save(policy)
    assert store.steps() == [9, 10]
    assert store.latest() == tmp_path / "step-00000010"


def test_the_best_model_is_replaced_whole(tiny_folder, tmp_path):
    policy, store = engine(tiny_folder("qwen3-tied")), CheckpointStore(tmp_path)
    assert store.best() is None
    store.save_best(policy, {"step": 0, "reward": 0.25})
    policy.train_step(a_step(), temperature=1.0)
    store.save_best(policy, {"step": 1, "reward": 0.5})
    assert store.best() == {"step": 1, "reward": 0.5}
    again = AutoModelForCausalLM.from_pretrained(store.best_folder())
    assert torch.equal(again.model.norm.weight, policy.model.base_model.norm.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["best-ahead"]
    store.save(policy)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", store.path(policy.step).name]
    assert store.best() == {"step": 1, "reward": 0.5}
    store.save_best(policy, {"step": 2, "reward": 0.75})
    assert store.best() == {"step": 2, "reward": 0.75}
    store.forget_best_after(1)  # its checkpoint was never saved
    assert store.best() == {"step": 1, "reward": 0.5}
    store.save_best(policy, {"step": 1, "reward": 0.8})
    store.forget_best_after(1)  # killed between checkpoint and renaming
    assert json.loads((tmp_path / "best" / "best.json").read_text()) == {"step": 1, "reward": 0.8}
    assert not (tmp_path / "best-ahead").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 3])
def test_exports_load_as_plain_transformers_folders(tiny_folder, tmp_path, kind, stage):
    policy = engine(tiny_folder(kind), zero_stage=stage)
    train(policy, range(2))
    policy.export(tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == kind.endswith("-tied")
    assert plain.generation_config.eos_token_id == [2, 0]
    ids = [5, 6, 7, 8, 9, 10]
    logp = torch.log_softmax(plain(torch.tensor([ids])).logits[0, 2:-1], -1)
    expected = logp.gather(-1, torch.tensor(ids[3:])[:, None])[:, 0].detach()
    [found] = policy.logprobs(ids[:3], [ids[3:]], temperature=1.0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert "rise" not in (tmp_path / "out" / "config.json").read_text()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == policy.tokenizer.chat_template


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_named_and_changes_nothing(tiny_folder, tmp_path):
    policy, store = engine(tiny_folder("qwen3-tied")), CheckpointStore(tmp_path)
    train(policy, range(1))
    folder = store.save(policy)
    states = next(folder.rglob("*.safetensors"))
    whole = states.read_bytes()
    other = engine(tiny_folder("qwen3-tied"))
    for damage, message in (
        (
            lambda: states.write_bytes(whole[:-10]),
            rf"rank-00000-000.safetensors has {len(whole) - 10} bytes instead of",
        ),
        (lambda: states.unlink(), "rank-00000-000.safetensors is missing"),
        (lambda: states.write_bytes(b"\0" * len(whole)), "cannot be read"),
        (lambda: (folder / "checkpoint.json").write_text("{"), "checkpoint.json cannot be read"),
        (lambda: (folder / "checkpoint.json").unlink(), "not a checkpoint"),
    ):
        damage()
        with pytest.raises(CheckpointError, match=message) as caught:
            store.load_latest(other)
        assert str(folder) in str(caught.value)
        assert other.step == 0


def test_a_checkpoint_of_something_else_is_refused(tiny_folder, tmp_path):
    policy, store = engine(tiny_folder("qwen3-tied")), CheckpointStore(tmp_path)
    folder = store.save(policy)
    with pytest.raises(CheckpointError, match="saved with model Qwen3ForCausalLM"):
        engine(tiny_folder("llama")).load(folder)
    with pytest.raises(CheckpointError, match="saved with dtype float32, but this run has bfloat16"):
        engine(tiny_folder("qwen3-tied"), dtype="bfloat16").load(folder)
    index = json.loads((folder / "checkpoint.json").read_text())
    index["parameters"]["model.norm.weight"]["parts"][0][2] -= 1
    (folder / "checkpoint.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: 31 of 32 values of its weight are there"):
        engine(tiny_folder("qwen3-tied")).load(folder)


# --- the model that a checkpoint leans on ----------------------------------------------------------------------------

LORA = {"lora": {"rank": 4, "alpha": 8}}


def nearly(folder: Path, target: Path) -> Path:
    """A copy of the model in which one weight differs in its last bit."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    one = weights["model.layers.1.mlp.up_proj.weight"].view(torch.int32)
    one[3, 5] ^= 1
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    "keys, kl_coef, what",
    [
        (LORA, 0.0, "frozen base of the adapters"),
        (LORA | {"zero_stage": 3}, 0.1, "frozen base of the adapters"),
        ({}, 0.1, "KL reference"),
        ({"zero_stage": 2, "dtype": "bfloat16"}, 0.1, "KL reference"),
    ],
)
def test_another_base_or_reference_is_refused_and_the_same_one_found_elsewhere_is_not(
    tiny_folder, tmp_path, keys, kl_coef, what
):
    base, loss = tiny_folder("llama"), LossSpec(kl_coef=kl_coef)

    def begun_from(folder: Path) -> PolicyEngine:
        return PolicyEngine(folder, EngineConfig(lr=1e-2, **keys), loss=loss)

    policy = begun_from(base)
    policy.train_step([s for s in a_step() if s.is_guide], temperature=1.0)
    saved = CheckpointStore(tmp_path / "c").save(policy)
    expected = policy.score(a_step(1), temperature=1.0)

    moved = shutil.copytree(base, tmp_path / "moved")
    resumed = begun_from(moved)
    resumed.load(saved)
    assert all(map(torch.equal, resumed.score(a_step(1), temperature=1.0), expected))

    other = nearly(base, tmp_path / "other")
    if keys.get("dtype") == "bfloat16":  # the same weights once rounded: the same model to this run
        begun_from(other).load(saved)
        other = make_tiny(tmp_path / "different", "llama", seed=1)
    changed = begun_from(other)
    with pytest.raises(CheckpointError) as caught:
        changed.load(saved)
    for part in (saved, f"its {what} is {base} with weights {policy.initial}", f"{other} with weights"):
        assert str(part) in str(caught.value)
    assert changed.initial != policy.initial
    assert changed.step == 0


def test_a_run_that_holds_all_it_needs_goes_on_from_any_model_of_its_shape(tiny_folder, tmp_path):
    policy = engine(tiny_folder("llama"))
    train(policy, range(2))
    folder = CheckpointStore(tmp_path).save(policy)
    other = engine(make_tiny(tmp_path / "other", "llama", seed=1))
    assert (policy.initial, other.initial) == (None, None)
    other.load(folder)
    assert train(other, range(2, 3)) == train(policy, range(2, 3))
    # What a KL run saved is exported by an engine without a KL term.
    with_kl = PolicyEngine(tiny_folder("llama"), EngineConfig(), loss=LossSpec(kl_coef=0.1))
    (tmp_path / "kl").mkdir()
    with_kl.save(tmp_path / "kl")
    engine(tmp_path / "other").load(tmp_path / "kl")


def test_adapters_are_not_scaled_by_another_alpha(tiny_folder, tmp_path):
    engine(tiny_folder("llama"), **LORA).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"saved with engine\.lora\.alpha 8, but this run has 16"):
        engine(tiny_folder("llama"), lora={"rank": 4, "alpha": 16}).load(tmp_path)


def test_a_folder_that_fails_to_be_written_leaves_the_old_one(tmp_path):
    target = tmp_path / "t"
    with new_folder(target) as aside:
        (aside / "a").write_text("old")

    def fail() -> None:
        with new_folder(target) as aside:
            (aside / "a").write_text("new")
            raise OSError("disk full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert (target / "a").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize("moment", ["writing", "swapping", "cleaning"])
def test_recovery_after_a_kill_at_any_moment_of_a_replacement(tmp_path, moment):
    """The states a killed process can leave: new folder half written, old one moved away, old one not yet removed."""
    for name, text in {
        "writing": {"t": "old", ".writing-t": "half"},
        "swapping": {".replaced-t": "old", ".writing-t": "new"},
        "cleaning": {"t": "new", ".replaced-t": "old"},
    }[moment].items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(text)
    recover(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
    assert (tmp_path / "t" / "a").read_text() == ("new" if moment == "cleaning" else "old")


FULL_DISK = """
import resource, sys
from pathlib import Path
from rise_engine.checkpoint import CheckpointError, CheckpointStore
from rise_engine.config import EngineConfig
from rise_engine.policy import PolicyEngine
policy = PolicyEngine(sys.argv[1], EngineConfig())
store = CheckpointStore(Path(sys.argv[2]))
store.save(policy)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
policy.step = 1
for save in (lambda: store.save(policy), lambda: store.save_best(policy, {})):
    try:
        save()
    except CheckpointError as error:
        print(error)
print(sorted(p.name for p in Path(sys.argv[2]).iterdir()))
policy.load(store.latest())
print("step", policy.step)
"""


@pytest.mark.slow
def test_a_disk_that_fills_up_while_saving_leaves_the_last_checkpoint(tiny_folder, tmp_path):
    """A limit on file size makes the kernel refuse the write, as a full disk does."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tiny_folder("qwen3-tied")), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    assert done.returncode == 0, done.stderr
    assert "step-00000001: could not be saved" in done.stdout
    assert "step-00000000 is intact" in done.stdout
    assert "best-ahead: could not be saved" in done.stdout
    assert lines[-2:] == ["['step-00000000']", "step 0"]
