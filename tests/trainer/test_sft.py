"""`rise-rl sft`: the mean -log p of the answers' tokens, three epochs, a validation share, exact resume."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from rise_engine.optimizer import NonFiniteError
from rise_engine.prompts import render_prompt
from rise_rl.cli import app
from rise_rl.config import ConfigError, load_as
from rise_rl.data import DataError
from rise_rl.launch import Interrupted
from rise_rl.run_folder import RunFolder, RunFolderError
from rise_rl.sft import SftTrainer, load_split, run_sft
from rise_rl.sft_config import SftConfig
from tests.engine.helpers import plain_logprobs, plain_model
from tests.tiny import tiny_tokenizer
from tests.trainer.conftest import WORDS, row

RECIPE = Path(__file__).parents[2] / "recipes/baselines/sft.yaml"
ANSWERS = [f"The {word} is fine, my name is Anna." for word in WORDS]


@pytest.fixture
def sft_config(tmp_path, tiny_folder):
    """9 answers: one for validation, 4 steps of 2 an epoch, three epochs."""

    def write(**changes) -> Path:
        rows = [row(f"u{i}", [word]) | {"answer": ANSWERS[i]} for i, word in enumerate(WORDS)]
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        config = {
            "name": "sft",
            "model": str(tiny_folder),
            "output": str(tmp_path / "runs"),
            "answers_per_step": 2,
            "validate_every": 6,
            "data": {
                "train": str(tmp_path / "train.jsonl"),
                "max_prompt_tokens": 128,
                "max_answer_tokens": 64,
            },
            "engine": {"lr": 0.003, "warmup_steps": 0, "micro_batch_tokens": 128},
            "checkpoint": {"every": 5},
        }
        config |= changes
        path = tmp_path / "sft.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    return write


def load(path: Path, *overrides: str) -> SftConfig:
    return load_as(SftConfig, path, overrides)


def mean_nll(folder: Path, examples) -> float:
    """In float64, prompt and answer as the chat template and the tokenizer have them, stop token included."""
    model, tokenizer = plain_model(folder, torch.float64), tiny_tokenizer()
    logprobs = []
    for e in examples:
        answer = [*tokenizer(e.meta["answer"]).input_ids, tokenizer.eos_token_id]
        logprobs.append(plain_logprobs(model, render_prompt(tokenizer, e.messages), answer, 1.0).detach())
    return -torch.cat(logprobs).mean().item()


def test_three_epochs_of_mean_token_loss_with_a_validation_share(sft_config, tiny_folder):
    config = load(sft_config())
    train, validation = load_split(config)
    assert (len(train), len(validation)) == (8, 1)
    folder = run_sft(config)
    run = RunFolder(folder)
    metrics, evals = run.metrics(), run.evals()
    assert [m["step"] for m in metrics] == list(range(1, 13))
    assert [e["step"] for e in evals] == [0, 6, 12]
    assert evals[0]["loss"] == pytest.approx(mean_nll(tiny_folder, validation), rel=1e-4)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    # One step over all eight answers: the mean is over their tokens together.
    [whole] = RunFolder(run_sft(load(sft_config(name="whole"), "answers_per_step=8", "epochs=1"))).metrics()
    assert whole["loss"] == pytest.approx(mean_nll(tiny_folder, train), rel=1e-4)
    exported = CliRunner().invoke(app, ["export", str(folder), str(folder.parent / "exported")], catch_exceptions=False)
    assert exported.exit_code == 0
    assert mean_nll(folder.parent / "exported", validation) == pytest.approx(evals[-1]["loss"], rel=1e-4)


def test_a_resumed_run_has_the_same_numbers(sft_config, monkeypatch):
    whole = RunFolder(run_sft(load(sft_config(), "name=whole")))
    monkeypatch.setattr("rise_rl.sft.RunFolder.log_metrics", stop_at(7))
    with pytest.raises(KeyboardInterrupt):
        run_sft(load(sft_config(), "name=killed"))
    monkeypatch.undo()
    resumed = RunFolder(run_sft(load(sft_config(), "name=killed"), resume=True))
    assert [m["loss"] for m in resumed.metrics()] == [m["loss"] for m in whole.metrics()]
    assert resumed.evals() == whole.evals()


def end_of(run: RunFolder) -> list[str]:
    return sorted(p.name for p in run.checkpoints.glob("step-*"))


def test_sigterm_finishes_the_step_saves_and_a_resumed_run_has_the_same_numbers(sft_config, monkeypatch):
    whole = RunFolder(run_sft(load(sft_config(), "name=whole")))
    original = RunFolder.log_metrics

    def told(self, values):
        if values["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, values)

    monkeypatch.setattr("rise_rl.sft.RunFolder.log_metrics", told)
    with pytest.raises(Interrupted):
        run_sft(load(sft_config(), "name=stopped"))
    monkeypatch.undo()
    stopped = RunFolder(Path(load(sft_config()).output) / "stopped")
    assert end_of(stopped) == ["step-00000003"]
    run_sft(load(sft_config(), "name=stopped"), resume=True)
    assert [m["loss"] for m in stopped.metrics()] == [m["loss"] for m in whole.metrics()]
    assert stopped.evals() == whole.evals()


@pytest.mark.parametrize("where, stands", [("update", ["step-00000006"]), ("validate", []), ("log_metrics", [])])
def test_an_error_saves_the_steps_before_it_and_no_half_of_one(sft_config, monkeypatch, where, stands):
    """A loss that is not finite leaves the weights of step 6, a validation or a log that fails those of a step that is
    not in the log: resuming there would drop its line, so nothing is saved.
    """

    def fail_in_step_7(*_, **__):
        raise {"update": NonFiniteError, "validate": DataError, "log_metrics": RunFolderError}[where]("as expected")

    step = SftTrainer.step

    def broken(self):
        if self.policy.step == 6:
            owner = {
                "update": "rise_rl.sft",
                "validate": "rise_rl.sft.SftTrainer",
                "log_metrics": "rise_rl.sft.RunFolder",
            }
            monkeypatch.setattr(f"{owner[where]}.{where}", fail_in_step_7)
        step(self)

    monkeypatch.setattr(SftTrainer, "step", broken)
    config = load(sft_config(checkpoint={"every": 0}), "validate_every=7")
    with pytest.raises((NonFiniteError, DataError, RunFolderError), match="as expected"):
        run_sft(config)
    monkeypatch.undo()
    run = RunFolder(Path(config.output) / config.name)
    assert end_of(run) == stands
    run_sft(config, resume=True)
    assert [m["step"] for m in run.metrics()] == list(range(1, 13))
    assert [e["step"] for e in run.evals()] == [0, 7, 12]


def stop_at(step):
    original = RunFolder.log_metrics

    def log(self, values):
        if values["step"] == step:
            raise KeyboardInterrupt
        original(self, values)

    return log


def test_rows_that_cannot_be_learnt_are_named(sft_config, tmp_path):
    path = sft_config()
    with pytest.raises(DataError, match=r"train\.jsonl, reply: prompt 'u0': expected an answer \(text\), found None"):
        run_sft(load(path, "data.answer=reply"))
    with pytest.raises(DataError, match=r"answer to 'u\d' has \d+ tokens, more than data\.max_answer_tokens \(4\)"):
        run_sft(load(path, "data.max_answer_tokens=4"))
    with pytest.raises(ConfigError, match="9 of 9 rows would leave nothing to train on"):
        run_sft(load(path, "data.validation=1"))
    with pytest.raises(ConfigError, match=r"^answers_per_step: 9 prompts a step, but the training data has only 8"):
        run_sft(load(path, "answers_per_step=9"))
    assert not (tmp_path / "runs/sft").exists()


def test_the_recipe_says_three_epochs_and_one_percent():
    result = CliRunner().invoke(app, ["sft", str(RECIPE), "--dry-run"], catch_exceptions=False)
    assert result.exit_code == 0
    config = load(RECIPE)
    assert (config.epochs, config.data.validation, config.data.answer) == (3, 0.01, "answer")
