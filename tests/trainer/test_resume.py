"""A run that is killed again and again leaves the same numbers as one that is left alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
VARYING = ("time/", "tokens_per_second", "memory/")

# (moment, step, --resume or not): before any checkpoint, inside one, at an epoch's end (steps 3 and 6), between a
# logged evaluation and its step, in the middle of a line, right after a checkpoint.
CHAIN = [
    ("rollouts-written", 1),
    ("inside-checkpoint", 2),
    ("metrics-logged", 3),
    ("evaluation-logged", 4),
    ("half-a-line", 5),
    ("checkpoint-saved", 6),
]


def launch(config: Path, moment: str, step: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.trainer.killed_run", moment, str(step), "train", str(config), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def numbers(run: Path, file: str) -> list[dict]:
    lines = [json.loads(line) for line in (run / file).read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(VARYING)} for line in lines]


def weights(run: Path) -> dict[str, torch.Tensor]:
    [last] = sorted((run / "checkpoints").glob("step-*"))[-1:]
    [file] = last.glob("*.safetensors")
    return load_file(file)


@pytest.mark.slow
def test_killed_runs_resume_to_the_same_numbers(tiny_config):
    config = tiny_config()
    runs = config.parent / "runs"
    whole = launch(config, "never", 0, "name=whole")
    assert whole.returncode == 0, whole.stderr

    for i, (moment, step) in enumerate(CHAIN):
        killed = launch(config, moment, step, "name=killed", *(["--resume"] if i else []))
        assert killed.returncode == -signal.SIGKILL, f"{moment} at step {step}: {killed.stdout}{killed.stderr}"
    finished = launch(config, "never", 0, "name=killed", "--resume")
    assert finished.returncode == 0, finished.stderr

    assert numbers(runs / "killed", "metrics.jsonl") == numbers(runs / "whole", "metrics.jsonl")
    assert numbers(runs / "killed", "evals.jsonl") == numbers(runs / "whole", "evals.jsonl")
    assert len(numbers(runs / "whole", "metrics.jsonl")) == 8
    for step in range(1, 9):
        name = f"rollouts/step_{step:06d}.jsonl"
        assert (runs / "killed" / name).read_bytes() == (runs / "whole" / name).read_bytes()
    a, b = weights(runs / "killed"), weights(runs / "whole")
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert not list((runs / "killed" / "checkpoints").glob(".writing-*"))
    assert len(json.loads((runs / "killed" / "manifest.json").read_text())["resumes"]) == len(CHAIN)


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tiny_config):
    config = tiny_config(checkpoint__every=0, steps=200, evaluation__every=0)
    command = [sys.executable, "-u", "-m", "rise_rl.cli", "train", str(config)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGINT)
            break
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 130, output
    assert f"-m rise_rl.cli train {config} --resume" in output  # the command that was used, ready to paste
    run = config.parent / "runs" / "tiny"
    [saved] = (run / "checkpoints").glob("step-*")
    done = len((run / "metrics.jsonl").read_text().splitlines())
    assert int(saved.name.removeprefix("step-")) == done < 200
