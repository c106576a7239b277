"""Two processes never write one run, and a resumed run is the run that was begun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from filelock import FileLock

import rise_rl.trainer
from rise_engine.checkpoint import CheckpointStore
from rise_rl.config import load_config
from rise_rl.launch import run_training
from rise_rl.run_folder import RunFolder, RunFolderError
from tests.trainer.conftest import row


def test_a_run_that_is_being_written_is_left_alone(tiny_config):
    config = load_config(tiny_config(steps=1, evaluation__every=0))
    folder = run_training(config)
    before = (folder / "metrics.jsonl").read_bytes()
    with FileLock(folder.with_name(".tiny.lock")), pytest.raises(RunFolderError, match="another process is writing"):
        run_training(config, resume=True)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_other_training_data_is_another_run(tiny_config):
    path = tiny_config(steps=1, evaluation__every=0)
    run_training(load_config(path))
    with (path.parent / "train.jsonl").open("a") as file:
        file.write(json.dumps(row("new", ["x"])) + "\n")
    with pytest.raises(RunFolderError, match="is not the data the run began with"):
        run_training(load_config(path, ["steps=2"]), resume=True)


def test_only_a_better_evaluation_replaces_the_best_model(tiny_config, monkeypatch):
    rewards = iter([0.4, 0.6, 0.5, 0.6])

    def evaluation(*_, **__):
        base = {"score/mean": 0.0, "length/mean": 1.0, "truncated": 0.0, "unknown_verdicts": 0, "ungraded_samples": 0}
        return {**base, "reward/mean": next(rewards), "samples": 4, "criteria": []}

    monkeypatch.setattr("rise_rl.trainer.evaluate", evaluation)
    folder = run_training(load_config(tiny_config(steps=3, evaluation__every=1)))
    assert CheckpointStore(folder / "checkpoints").best() == {"step": 1, "reward": 0.6}


def test_a_best_model_from_beyond_the_checkpoint_is_forgotten_on_resume(tiny_config):
    path = tiny_config(steps=2, evaluation__every=1, checkpoint__every=2)
    folder = run_training(load_config(path))
    best = folder / "checkpoints" / "best" / "best.json"
    best.write_text('{"step": 3, "reward": 2.0}')
    run_training(load_config(path, ["steps=3"]), resume=True)
    assert CheckpointStore(folder / "checkpoints").best()["reward"] <= 1.0


def test_a_resumed_run_still_has_the_best_model_of_before_the_checkpoint(tiny_config, monkeypatch):
    rewards = {0: 0.5, 1: 0.4, 2: 0.45, 3: 0.6}
    where = []
    init, real = rise_rl.trainer.Trainer.__init__, rise_rl.trainer.evaluate

    def remember(self, *args, **keywords):
        init(self, *args, **keywords)
        where.append(self)

    def scripted(*args, **keywords):
        step = where[-1].done
        if step == 4 and len(where) == 1:
            raise KeyboardInterrupt  # a kill: nothing is saved
        return {**real(*args, **keywords), "reward/mean": rewards.get(step, 0.3)}

    monkeypatch.setattr(rise_rl.trainer.Trainer, "__init__", remember)
    monkeypatch.setattr(rise_rl.trainer, "evaluate", scripted)
    config = load_config(tiny_config(steps=4, evaluation__every=1, checkpoint__every=2))
    with pytest.raises(KeyboardInterrupt):
        run_training(config)
    store = CheckpointStore(RunFolder(Path(config.output) / config.name).checkpoints)
    assert store.steps() == [2]
    assert store.best() == {"step": 3, "reward": 0.6}
    rewards[3] = 0.3  # another machine, other rounding
    run_training(config, resume=True)
    assert store.best() == {"step": 0, "reward": 0.5}


def test_an_evaluation_that_is_mostly_ungraded_makes_no_best_model(tiny_config, monkeypatch):
    def evaluation(*_, **__):
        base = {"score/mean": 0.9, "length/mean": 1.0, "truncated": 0.0, "unknown_verdicts": 3, "ungraded_samples": 3}
        return {**base, "reward/mean": 0.9, "samples": 4, "criteria": []}

    monkeypatch.setattr("rise_rl.trainer.evaluate", evaluation)
    folder = run_training(load_config(tiny_config(steps=1, evaluation__every=1)))
    assert CheckpointStore(folder / "checkpoints").best() is None
