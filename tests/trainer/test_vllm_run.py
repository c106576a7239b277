"""Whole runs whose answers come from vLLM, and who samples when nobody is asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from rise_engine.rollout import vllm_start
from rise_engine.rollout.checks import RolloutError
from rise_rl import launch, rollout_choice
from rise_rl.config import ConfigError, load_config
from rise_rl.launch import run_training
from rise_rl.step_sampler import StepSampler
from tests.tiny import make_tiny
from tests.torchrun import torchrun
from tests.trainer.test_resume import numbers, weights

ROOT = Path(__file__).parents[2]


def run(path, *overrides, resume=False):
    console = Console(record=True, width=200)
    folder = run_training(load_config(path, list(overrides)), resume=resume, console=console)
    return folder, console.export_text()


@pytest.fixture
def vllm_config(tiny_config, tmp_path):
    pytest.importorskip("vllm")
    model = make_tiny(tmp_path / "wide", "llama-tied", scale=4.0, head_dim=32)
    return tiny_config(model=str(model), rollout={"max_new_tokens": 24, "engine": "vllm"}, steps=4)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_numbers_whatever_ended_it(vllm_config, monkeypatch):
    whole, said = run(vllm_config, "name=whole")
    assert "rollouts by vllm: version 0." in said
    assert json.loads((whole / "manifest.json").read_text())["rollouts"]["engine"] == "vllm"
    for line in numbers(whole, "metrics.jsonl"):
        assert line["logprob_gap/max"] <= 1e-3
        assert line["logprob_gap/mean"] <= 1e-4
        assert line["ratio/mean"] == pytest.approx(1, abs=1e-4)

    sample = StepSampler.sample

    def worker_dies(self, step, *arguments, **keywords):
        if step == 3:
            engine = self.schedule.rollouts.llm.llm_engine
            runner = engine.model_executor.driver_worker.worker.model_runner
            monkeypatch.setattr(runner, "execute_model", lambda *_, **__: 1 / 0)
        return sample(self, step, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(StepSampler, "sample", worker_dies)
        with pytest.raises(RolloutError, match=r"weights of step 2: ZeroDivisionError.*Resume the run"):
            run(vllm_config, "name=cut", "checkpoint.every=0")
    cut = whole.parent / "cut"
    assert [p.name for p in (cut / "checkpoints").glob("step-*")] == ["step-00000002"]  # saved as it fell
    run(vllm_config, "name=cut", "checkpoint.every=0", resume=True)

    assert numbers(cut, "metrics.jsonl") == numbers(whole, "metrics.jsonl")
    assert numbers(cut, "evals.jsonl") == numbers(whole, "evals.jsonl")
    for step in range(1, 5):
        name = f"rollouts/step_{step:06d}.jsonl"
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    a, b = weights(cut), weights(whole)
    assert all((a[name] == b[name]).all() for name in b)


@pytest.mark.slow
def test_an_overlapped_run_trains_and_its_engine_agrees(vllm_config):
    folder, _ = run(vllm_config, "rollout.schedule=overlapped", "steps=2", "data.heldout=null")
    for line in numbers(folder, "metrics.jsonl"):
        assert line["logprob_gap/max"] <= 1e-3
        assert line["guided/generated"] > 0
    records = [json.loads(line) for line in (folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    natural = [(r["uid"], r["index"]) for r in records if r["kind"] == "natural"]
    assert natural == [(uid, i) for uid in dict.fromkeys(uid for uid, _ in natural) for i in range(4)]


@pytest.mark.slow
def test_two_ranks_with_an_engine_each_and_with_one_between_them_sample_the_same(vllm_config):
    """Under ZeRO-3, which transformers cannot sample from, and with a model that is split for sampling."""
    shared = ["engine.zero_stage=2", "rollout.vllm.tensor_parallel_size=2"]
    found = []
    for name, overrides in [("each", ["engine.zero_stage=3"]), ("shared", shared)]:
        torchrun("-m", "rise_rl.cli", "train", vllm_config, f"name={name}", "steps=2", *overrides)
        run = vllm_config.parent / "runs" / name
        for line in numbers(run, "metrics.jsonl"):
            assert line["logprob_gap/max"] <= 1e-3
        found.append([json.loads(x) for x in (run / "rollouts" / "step_000001.jsonl").read_text().splitlines()])
    each, shared_answers = ([r["response"] for r in records if r["kind"] == "natural"] for records in found)
    assert len(set(each)) == 8
    assert sum(a == b for a, b in zip(each, shared_answers, strict=True)) >= 7  # split sums round otherwise


# --- who samples -----------------------------------------------------------------------------------------------------


def test_without_vllm_transformers_samples_and_the_run_says_why(tiny_config, monkeypatch):
    monkeypatch.setattr(vllm_start, "installed", lambda: False)
    folder, said = run(tiny_config(steps=1, data__heldout=None))
    assert "rollouts by transformers: vLLM is not installed" in said
    found = json.loads((folder / "manifest.json").read_text())["rollouts"]
    assert found == {"engine": "transformers", "reason": "vLLM is not installed"}


def test_vllm_that_is_asked_for_and_missing_is_an_error(tiny_config, monkeypatch):
    monkeypatch.setattr(vllm_start, "installed", lambda: False)
    with pytest.raises(
        ConfigError, match=r"rollout\.engine: vllm, but vLLM is not installed; use transformers, or auto"
    ):
        run(config := tiny_config(rollout__engine="vllm"))
    assert not (config.parent / "runs" / "tiny").exists()  # so that the corrected command needs no --resume


@pytest.mark.parametrize(
    "engine, device, reason",
    [
        ("vllm", "cpu", "asked for by rollout.engine"),
        ("auto", "cuda", "installed"),
        ("auto", "cpu", r"installed; on a CPU transformers can be as fast \(docs/rollouts.md\)"),
    ],
)
def test_vllm_is_taken_where_it_serves_the_model_and_nobody_is_promised_speed(
    tiny_config, monkeypatch, engine, device, reason
):
    monkeypatch.setattr(rollout_choice, "why_not", lambda _: None)
    monkeypatch.setattr(rollout_choice, "version", lambda: "0.32.0")
    policy = SimpleNamespace(device=torch.device(device))
    chosen = str(rollout_choice.choose(load_config(tiny_config(rollout__engine=engine)), policy))
    assert re.fullmatch(f"rollouts by vllm: version 0.32.0, {reason}", chosen)


def test_an_engine_that_does_not_start_leaves_no_run_behind(tiny_config, monkeypatch):
    def fails(*_):
        raise ValueError("vLLM does not start: no memory")

    config = tiny_config(steps=1, data__heldout=None)
    with monkeypatch.context() as patch:
        patch.setattr(launch, "make_rollouts", fails)
        with pytest.raises(ConfigError, match="rollout: vLLM does not start: no memory"):
            run(config)
    assert not (config.parent / "runs" / "tiny").exists()
    folder, _ = run(config)  # the corrected command needs no --resume
    assert json.loads((folder / "manifest.json").read_text())["rollouts"]["engine"] == "transformers"


def test_a_model_that_vllm_has_no_attention_for_is_sampled_by_transformers(tiny_config, monkeypatch):
    monkeypatch.setattr(vllm_start, "installed", lambda: True)
    _, said = run(tiny_config(steps=1, data__heldout=None))
    assert "rollouts by transformers: vLLM on a CPU has no attention for the model's head_dim 8" in said
    _, said = run(tiny_config(steps=1, data__heldout=None, rollout__engine="transformers"), "name=asked")
    assert "rollouts by transformers: asked for by rollout.engine" in said
