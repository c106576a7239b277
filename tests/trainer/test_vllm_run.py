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
from rise_engine.rollout.checks import RequestError, RolloutError
from rise_engine.rollout.vllm import VllmStream
from rise_rl import launch, rollout_choice
from rise_rl.config import ConfigError, load_config
from rise_rl.launch import run_training
from rise_rl.schedules import _Grading
from rise_rl.step_sampler import StepSampler
from tests.tiny import make_tiny
from tests.trainer.test_resume import numbers, weights
from tests.trainer.test_several_ranks import GRACE
from tests.trainer.test_several_ranks import launch as on_ranks

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
def test_an_overlapped_run_begins_guided_answers_early_and_its_engine_agrees(vllm_config, monkeypatch):
    """With importance correction. The last step asks for more than the context holds."""
    finished, add, begun = _Grading.finished, VllmStream.add, []

    def at_once(grading, *, wait_for_one):  # as soon as its last natural answer is there, a prompt is graded
        return finished(grading, wait_for_one=wait_for_one or grading.pending > 0)

    def watched(stream, requests):
        asked = {r.uid for r in requests} - {"parity-probe"}
        if asked:
            begun.append((asked, {r.uid for _, r in stream.running.values()}))
            if stream.version == 2:
                stream.rollouts.context_length = 64
        return add(stream, requests)

    monkeypatch.setattr(_Grading, "finished", at_once)
    monkeypatch.setattr(VllmStream, "add", watched)
    changes = ["rollout.schedule=overlapped", "rollout.max_rows=4", "steps=3", "data.heldout=null"]
    changes += ["grpo.importance_correction=token", "grpo.importance_cap=1", "checkpoint.every=0"]
    with pytest.raises(RequestError, match=r"request 'train-\d': .* the context is 64"):
        run(vllm_config, *changes)
    folder = vllm_config.parent / "runs" / "tiny"
    assert [p.name for p in (folder / "checkpoints").glob("step-*")] == ["step-00000002"]

    lines = numbers(folder, "metrics.jsonl")
    assert len(lines) == 2
    for line in lines:
        assert line["logprob_gap/max"] <= 1e-3
        assert line["guided/generated"] > 0
        assert 0 < line["importance/kept"] < 1  # the engine's own log-probs, to rounding those of the trainer
    (natural, nothing), (guided, running) = begun[:2]
    assert (len(natural), nothing, len(guided)) == (2, set(), 1)
    assert running == natural - guided  # none of whose guided answers has begun
    records = [json.loads(line) for line in (folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    in_order = [(r["uid"], r["index"]) for r in records if r["kind"] == "natural"]
    assert in_order == [(uid, i) for uid in dict.fromkeys(uid for uid, _ in in_order) for i in range(4)]


@pytest.mark.slow
def test_two_ranks_with_an_engine_each_and_with_one_between_them_sample_the_same(vllm_config):
    """Under ZeRO-3, which transformers cannot sample from, and with a model that is split for sampling. There a grader
    fails on one rank while the other waits for its guided requests, at last.
    """
    runs, found = vllm_config.parent / "runs", []
    whole = on_ranks(vllm_config, "never", 0, 0, "name=each", "steps=2", "engine.zero_stage=3")
    assert whole.code == 0, whole.errors
    shared = ["engine.zero_stage=2", "rollout.vllm.tensor_parallel_size=2"]
    hurt = on_ranks(vllm_config, "bug-in-grader", 1, 3, "name=shared", *shared)
    assert hurt.code != 0
    assert hurt.seconds < 2 * whole.seconds + GRACE
    said = hurt.output + hurt.errors
    assert said.count("error: rank 1") == said.count('KeyError: "a bug in somebody\'s grader"') == 1, said
    for name in ("each", "shared"):
        lines = numbers(runs / name, "metrics.jsonl")
        assert len(lines) == 2
        for line in lines:
            assert line["logprob_gap/max"] <= 1e-3
        records = (runs / name / "rollouts" / "step_000001.jsonl").read_text().splitlines()
        found.append([json.loads(record) for record in records])
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
