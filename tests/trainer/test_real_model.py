"""The quickstart on the real small model, a few steps of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rise_rl.config import load_config
from rise_rl.fetch import fetch
from rise_rl.launch import run_training
from rise_rl.report import write_report

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_quickstart_runs_on_the_real_model(tmp_path, monkeypatch):
    fetch("smollm2-135m")
    monkeypatch.chdir(ROOT)
    small = [
        *("steps=2", "grpo.prompts_per_step=2", "grpo.group_size=4", "guidance.rollouts=2", "guidance.remove_at=1"),
        *("rollout.max_new_tokens=16", "evaluation.prompts=2", "evaluation.samples=1", f"output={tmp_path}"),
    ]
    folder = run_training(load_config("recipes/quickstart.yaml", small))
    first, second = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    assert (first["guided/generated"], second["guided/generated"]) == (4, 0)
    for m in (first, second):
        assert 0 <= m["reward/natural"] <= 1
        assert m["grad_norm"] > 0
        assert m["logprob_gap/max"] < 1e-3  # the engine that sampled and the one that trains agree
        assert 0.5 < m["entropy"] < 5  # a trained language model, neither collapsed nor random
    assert write_report(folder).stat().st_size > 10_000
