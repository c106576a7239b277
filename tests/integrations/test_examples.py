from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str) -> str:
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_plain_pytorch():
    losses = [float(x) for x in re.findall(r"guide loss (\S+)", run("plain_pytorch.py"))]
    assert len(losses) == 3
    assert losses[2] < losses[0]


@pytest.mark.slow
def test_sft():
    out = run("hf_sft.py")
    losses = [float(x) for x in re.findall(r"[\d.]+", out[out.index("losses:") : out.index("answer:")])]
    assert losses[-1] < losses[0] - 1


@pytest.mark.slow
def test_grpo():
    out = run("trl_grpo.py")
    rewards = [float(x) for x in re.findall(r"[\d.]+", out[out.index("rewards:") :])]
    assert len(rewards) == 3


def test_every_example_is_run():
    tested = Path(__file__).read_text()
    assert all(f'"{path.name}"' in tested for path in EXAMPLES.glob("*.py") if path.name != "tiny.py")
