from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rise_rl.config import Config
from rise_rl.files import FileError, read_lines, write_aside
from rise_rl.metrics import EVAL_METRICS, METRICS, markdown
from rise_rl.run_folder import RunFolder, RunFolderError, changed_keys
from tests.run.synthetic import create


def config(**changes) -> Config:
    values = {"name": "test", "model": "smollm2-135m", "steps": 10, "data": {"train": "train.jsonl"}}
    return Config.model_validate(values | changes)


def logged(path: Path, steps: int = 5) -> RunFolder:
    run = create(path, config())
    run.log_eval({"step": 0, "reward/mean": 0.1})
    for step in range(1, steps + 1):
        run.log_metrics({"step": step, "reward/natural": step / 10})
        run.write_rollouts(step, [{"uid": "a", "response": f"answer {step}", "verdicts": [1.0, None]}])
        if step % 2 == 0:
            run.log_eval({"step": step, "reward/mean": step / 10})
    return run


def test_a_line_has_every_name_and_null_for_what_is_not_finite(tmp_path):
    run = create(tmp_path / "run", config())
    run.log_metrics({"step": 1, "loss": math.nan, "grad_norm": math.inf, "guidance/active": True, "entropy": 2.5})
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    row = json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    assert list(row) == list(METRICS)
    assert row == dict.fromkeys(METRICS) | {"step": 1, "guidance/active": True, "entropy": 2.5}


def test_nested_values_that_are_not_finite_become_null(tmp_path):
    run = create(tmp_path / "run", config())
    run.log_eval({"step": 0, "criteria": [{"uid": "a", "failures": math.nan, "samples": 0}]})
    run.write_rollouts(1, [{"verdicts": (1.0, -math.inf), "response": "naïve\n日本"}])
    assert run.evals()[0]["criteria"] == [{"uid": "a", "failures": None, "samples": 0}]
    assert run.rollouts(1) == [{"verdicts": [1.0, None], "response": "naïve\n日本"}]
    assert (tmp_path / "run" / "rollouts" / "step_000001.jsonl").is_file()


def test_unknown_names_and_repeated_steps_are_refused(tmp_path):
    run = logged(tmp_path / "run")
    with pytest.raises(ValueError, match=r"'reward/naturl'.*did you mean 'reward/natural'"):
        run.log_metrics({"step": 6, "reward/naturl": 0.1})
    with pytest.raises(ValueError, match="'lambda'"):
        run.log_eval({"step": 6, "lambda": 0.1})
    with pytest.raises(ValueError, match="step 5 after step 5"):
        run.log_metrics({"step": 5})
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4, 5]


def test_every_line_is_synced_before_the_call_returns(tmp_path, monkeypatch):
    run, synced = create(tmp_path / "run", config()), []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd)))
    run.log_metrics({"step": 1})
    assert synced == [(tmp_path / "run" / "metrics.jsonl").stat().st_size]


def test_a_fresh_run_needs_an_empty_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml.tmp").touch()  # killed while starting: nothing to lose
    create(tmp_path / "run", config())
    before = (tmp_path / "run" / "manifest.json").read_text()
    with pytest.raises(RunFolderError, match=r"already there.*config.yaml.*--resume"):
        create(tmp_path / "run", config(steps=11))
    assert (tmp_path / "run" / "manifest.json").read_text() == before
    with pytest.raises(RunFolderError, match="no run to resume"):
        RunFolder.resume(tmp_path / "other", config())
    assert not (tmp_path / "other").exists()
    with pytest.raises(RunFolderError, match="not a run folder"):
        RunFolder(tmp_path).config()


def test_resume_drops_what_is_later_than_the_checkpoint(tmp_path):
    logged(tmp_path / "run")
    run = RunFolder.resume(tmp_path / "run", config())
    run.truncate_after(3)
    assert [row["step"] for row in run.metrics()] == [1, 2, 3]
    assert [row["step"] for row in run.evals()] == [0, 2]
    assert run.rollout_steps() == [1, 2, 3]
    run.log_metrics({"step": 4})
    run.log_eval({"step": 4})
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4]


def test_resume_without_a_checkpoint_starts_again(tmp_path):
    logged(tmp_path / "run")
    run = RunFolder.resume(tmp_path / "run", config())
    run.truncate_after(0)
    assert (run.metrics(), run.evals(), run.rollout_steps()) == ([], [], [])
    run.log_eval({"step": 0})


@pytest.mark.parametrize("file", ["metrics.jsonl", "evals.jsonl"])
def test_a_kill_in_the_middle_of_a_line_costs_that_line_only(tmp_path, file):
    logged(tmp_path / "run", steps=4)
    path = tmp_path / "run" / file
    whole = path.read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    for cut in [*range(last + 1, len(whole), 301), len(whole) - 1]:
        path.write_bytes(whole[:cut])
        complete = cut == len(whole) - 1  # only the newline is missing: the row itself is whole
        assert len(read_lines(path)) == whole.count(b"\n") - (0 if complete else 1)
        run = RunFolder.resume(tmp_path / "run", config())
        run.truncate_after(3)
        rows = path.read_bytes()
        assert whole.startswith(rows)
        assert rows.endswith(b"\n")
        (tmp_path / "run" / "metrics.jsonl").write_bytes(whole if file == "metrics.jsonl" else run_metrics(4))


def run_metrics(steps: int) -> bytes:
    return b"".join(json.dumps(dict.fromkeys(METRICS) | {"step": s}).encode() + b"\n" for s in range(1, steps + 1))


def test_damage_elsewhere_is_an_error_that_names_the_line(tmp_path):
    run = logged(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step" 2'))
    with pytest.raises(RunFolderError, match=r"metrics.jsonl, line 2: not JSON"):
        run.metrics()


def test_a_log_that_ends_before_the_checkpoint_is_an_error(tmp_path):
    logged(tmp_path / "run", steps=2)
    with pytest.raises(RunFolderError, match=r"checkpoint is of step 4 but metrics\.jsonl ends at step 2"):
        RunFolder.resume(tmp_path / "run", config()).truncate_after(4)


def test_truncation_is_atomic(tmp_path, monkeypatch):
    logged(tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    run = RunFolder.resume(tmp_path / "run", config())
    real = os.replace

    def killed(source, target):
        if str(target).endswith("metrics.jsonl"):
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run.truncate_after(3)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    monkeypatch.undo()
    RunFolder.resume(tmp_path / "run", config()).truncate_after(3)
    assert [row["step"] for row in run.metrics()] == [1, 2, 3]


def test_a_full_disk_is_reported_and_what_was_there_stands(tmp_path):
    """A real ENOSPC, from /dev/full."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    run = logged(tmp_path / "run")
    (tmp_path / "run" / "evals.jsonl").unlink()
    (tmp_path / "run" / "evals.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match=r"evals.jsonl: cannot be written \(No space left on device\).*--resume"):
        run.log_eval({"step": 5})
    assert len(run.metrics()) == 5


def test_a_failed_write_aside_leaves_the_old_file(tmp_path, monkeypatch):
    write_aside(tmp_path / "x.json", "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match=r"x.json: cannot be written \(No space left"):
        write_aside(tmp_path / "x.json", "new")
    with pytest.raises(RunFolderError, match=r"No space left.*go on with --resume"):
        RunFolder(tmp_path, config()).write_rollouts(1, [{"uid": "a"}])
    (tmp_path / "rollouts").rmdir()
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    assert (tmp_path / "x.json").read_text() == "old"


def test_the_manifest_says_what_the_run_was_made_of(tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text('{"a": 1}\n')
    run = create(tmp_path / "run", config(data={"train": str(data), "heldout": "org/dataset"}))
    manifest = run.manifest()
    assert manifest["data"] == {
        "train": {"source": str(data), "sha256": hashlib.sha256(b'{"a": 1}\n').hexdigest()},
        "heldout": {"source": "org/dataset", "sha256": None},
    }
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["python"] == ".".join(map(str, sys.version_info[:3]))
    assert manifest["hardware"]["cores"] == os.cpu_count()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    if head.returncode == 0:
        assert manifest["code"]["revision"] == head.stdout.strip()
    assert set(manifest) >= {"name", "started", "command"}
    assert manifest["resumes"] == []


def test_a_resume_is_recorded_with_what_changed(tmp_path):
    logged(tmp_path / "run")
    changed = config(steps=20, engine={"lr": 5e-6}, rollout={"temperature": 0.7})
    run = RunFolder.resume(tmp_path / "run", changed)
    assert run.config()["steps"] == 10  # nothing is written before the checkpoint is loaded
    run.truncate_after(3)
    (entry,) = run.manifest()["resumes"]
    assert (entry["after_step"], entry["logged_until"]) == (3, 5)
    assert entry["config_changes"] == {
        "steps": [10, 20],
        "engine.lr": [config().engine.lr, 5e-6],
        "rollout.temperature": [1.0, 0.7],
    }
    assert run.config()["steps"] == 10  # no line was logged under the new one
    run.log_metrics({"step": 4})
    assert run.config()["steps"] == 20
    RunFolder.resume(tmp_path / "run", changed).truncate_after(2)
    assert [e["after_step"] for e in run.manifest()["resumes"]] == [3, 2]
    assert run.manifest()["resumes"][1]["config_changes"] == {}


@pytest.mark.parametrize("key", ["train", "heldout"])
def test_other_data_is_another_run(tmp_path, key):
    data = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "heldout")}
    for path in data.values():
        Path(path).write_text(path)
    create(tmp_path / "run", config(data=data))
    Path(data[key]).rename(tmp_path / "moved.jsonl")
    data[key] = str(tmp_path / "moved.jsonl")
    RunFolder.resume(tmp_path / "run", config(data=data))
    Path(data[key]).write_text("other")
    with pytest.raises(RunFolderError, match=rf"data\.{key}: .*moved\.jsonl is not the data the run began with"):
        RunFolder.resume(tmp_path / "run", config(data=data))
    with pytest.raises(RunFolderError, match=rf"data\.{key}: owner/rubrics is not the data"):
        RunFolder.resume(tmp_path / "run", config(data=data | {key: "owner/rubrics"}))


def test_a_held_out_file_that_a_resume_adds_is_the_runs_from_then_on(tmp_path):
    create(tmp_path / "run", config())
    RunFolder.resume(tmp_path / "run", config(data={"train": "train.jsonl", "heldout": "owner/a"})).truncate_after(0)
    RunFolder.resume(tmp_path / "run", config())
    with pytest.raises(RunFolderError, match=r"data\.heldout: owner/b is not the data the run began with \(owner/a\)"):
        RunFolder.resume(tmp_path / "run", config(data={"train": "train.jsonl", "heldout": "owner/b"}))


def test_a_kill_before_the_manifest_was_written_can_be_resumed(tmp_path):
    create(tmp_path / "run", config())
    (tmp_path / "run" / "manifest.json").unlink()
    run = RunFolder.resume(tmp_path / "run", config())
    run.truncate_after(0)
    with run:
        run.log_eval({"step": 0})
    assert run.manifest()["name"] == "test"


def test_a_folder_opened_for_reading_is_not_written(tmp_path):
    logged(tmp_path / "run")
    with pytest.raises(ValueError, match="opened for reading"):
        RunFolder(tmp_path / "run").log_metrics({"step": 9})


def test_changed_keys_are_dotted_leaves():
    assert changed_keys({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4}, "e": 5}) == {
        "a.c": [2, 4],
        "d": [3, None],
        "e": [None, 5],
    }


def test_the_metrics_page_is_current():
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == markdown(), "run `python -m rise_rl.metrics > docs/metrics.md`"
    assert all(m.description for m in [*METRICS.values(), *EVAL_METRICS.values()])
