from __future__ import annotations

import importlib.util
import json

import pytest

from rise_rl.config import Config
from rise_rl.errors import RiseError
from rise_rl.run_folder import RunFolder
from rise_rl.trackers import Unrepeated, Wandb, numbers
from tests.run.synthetic import create


def config(*trackers: str) -> Config:
    values = {
        "name": "test",
        "model": "m",
        "steps": 10,
        "data": {"train": "t"},
        "trackers": trackers or ("tensorboard",),
    }
    return Config.model_validate(values)


def scalars(folder, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), purge_orphaned_data=True)
    events.Reload()
    return [(e.step, pytest.approx(e.value)) for e in events.Scalars(tag)]


def log_steps(run: RunFolder, first: int, last: int) -> None:
    with run:
        if first == 1:
            run.log_eval({"step": 0, "reward/mean": 0.0, "criteria": [{"uid": "a"}]})
        for step in range(first, last + 1):
            run.log_eval({"step": step, "reward/mean": step / 100})
            run.log_metrics({"step": step, "loss": None, "guidance/active": True, "entropy": step / 10})


def test_tensorboard_shows_every_number(tmp_path):
    log_steps(create(tmp_path / "run", config()), 1, 3)
    folder = tmp_path / "run" / "tensorboard"
    assert scalars(folder, "entropy") == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert scalars(folder, "guidance/active") == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert scalars(folder, "eval/reward/mean") == [(0, 0.0), (1, 0.01), (2, 0.02), (3, 0.03)]


def test_a_tracker_that_is_not_asked_for_is_neither_needed_nor_written(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "tensorboard" else real(n, *a))
    log_steps(create(tmp_path / "run", config().model_copy(update={"trackers": ()})), 1, 1)
    assert not (tmp_path / "run" / "tensorboard").exists()


@pytest.mark.parametrize("checkpoints", [(3,), (3, 4), (0,)])
def test_tensorboard_shows_no_step_twice_after_resumes(tmp_path, checkpoints):
    log_steps(create(tmp_path / "run", config()), 1, 5)
    for step in checkpoints:
        run = RunFolder.resume(tmp_path / "run", config())
        run.truncate_after(step)
        log_steps(run, step + 1, 6)
    folder = tmp_path / "run" / "tensorboard"
    assert scalars(folder, "entropy") == [(s, s / 10) for s in range(1, 7)]
    assert scalars(folder, "eval/reward/mean") == [(s, s / 100) for s in range(7)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_an_error_before_anything_is_made(tmp_path, monkeypatch, name):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == name else real(n, *a))
    with pytest.raises(RiseError, match=f"trackers: {name} is not installed; `pip install {name}`"):
        create(tmp_path / "run", config(name))
    assert not (tmp_path / "run").exists()


class Recorder:
    def __init__(self):
        self.sent = []

    def log(self, values, step):
        self.sent.append((next(iter(values)), step))

    def close(self):
        self.sent.append("closed")


def test_steps_sent_before_a_kill_are_not_sent_twice():
    recorder = Recorder()
    tracker = Unrepeated(recorder, sent_until=4, evaluated_until=3)
    for step in range(2, 7):
        tracker.log({"x": 1.0}, step)
        tracker.log({"eval/x": 1.0}, step)
    tracker.close()
    assert recorder.sent == [("eval/x", 4), ("x", 5), ("eval/x", 5), ("x", 6), ("eval/x", 6), "closed"]


def test_an_evaluation_that_failed_after_its_step_was_sent_is_sent_when_it_is_made_up_for(tmp_path, monkeypatch):
    """The step is whole, so it is logged and saved, and --resume begins with the evaluation alone."""
    recorder = Recorder()
    monkeypatch.setattr("rise_rl.trackers.Trackio", lambda *_: recorder)
    monkeypatch.setattr("rise_rl.trackers.check_trackers", lambda _: None)
    monkeypatch.setattr("rise_rl.run_folder.check_trackers", lambda _: None)
    with create(tmp_path / "run", config("trackio")) as run:
        run.log_eval({"step": 0, "reward/mean": 0.0})
        run.log_metrics({"step": 1, "entropy": 0.1})
    for _ in range(2):  # the second time, the evaluation is the same one again
        run = RunFolder.resume(tmp_path / "run", config("trackio"))
        run.truncate_after(1)
        with run:
            if not any(record["step"] == 1 for record in run.evals()):
                run.log_eval({"step": 1, "reward/mean": 0.5})
    assert [x for x in recorder.sent if x != "closed"] == [
        ("eval/reward/mean", 0),
        ("entropy", 1),
        ("eval/reward/mean", 1),
    ]


def test_only_numbers_make_curves():
    assert numbers({"step": 1, "a": 2, "b": None, "c": [1], "d": "x", "e": True}) == {"a": 2.0, "e": 1.0}


@pytest.mark.slow
def test_trackio_has_every_step_once_after_a_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    log_steps(create(tmp_path / "run", config("trackio")), 1, 5)
    run = RunFolder.resume(tmp_path / "run", config("trackio"))
    run.truncate_after(3)
    log_steps(run, 4, 6)
    (name,) = SQLiteStorage.get_runs("rise-rl")
    rows = [row for row in SQLiteStorage.get_logs("rise-rl", name) if "entropy" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_wandb_runs_offline_under_one_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_steps(create(tmp_path / "run", config("wandb")), 1, 3)
    run = RunFolder.resume(tmp_path / "run", config("wandb"))
    run.truncate_after(2)
    log_steps(run, 3, 4)
    folders = [p.name for p in (tmp_path / "run" / "wandb").glob("offline-run-*")]
    assert len(folders) == 2
    assert len({name.split("-", 3)[-1] for name in folders}) == 1
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["resumes"]


@pytest.mark.slow
def test_wandb_takes_an_evaluation_of_an_earlier_step(tmp_path, monkeypatch):
    """wandb drops rows of a step that it has left, so this one joins the row it is at, over a step of its own."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = Wandb(tmp_path, "run", "run-1", {})
    sent = []
    log = tracker.run.log
    monkeypatch.setattr(tracker.run, "log", lambda values, step: (sent.append((values, step)), log(values, step=step)))
    tracker.log({"eval/x": 0.0}, 0)
    tracker.log({"x": 1.0}, 1)
    tracker.log({"x": 2.0}, 2)
    tracker.log({"eval/x": 0.5}, 1)
    tracker.log({"x": 3.0}, 3)
    tracker.close()
    assert wandb.run is None
    assert sent[0] == ({"eval/x": 0.0, "eval/step": 0}, 0)
    assert sent[3] == ({"eval/x": 0.5, "eval/step": 1}, 2)
    assert [step for _, step in sent] == sorted(step for _, step in sent)
