"""`rise-rl train` on two ranks: the same run as on one, and whatever happens to one rank, both end soon, somebody says
why, and --resume goes on with the same numbers.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from rise_rl.cli import app
from rise_rl.config import load_config
from rise_rl.launch import run_training
from tests.torchrun import torchrun
from tests.trainer.test_resume import numbers

ROOT = Path(__file__).parents[2]
GRACE = 45
"""Seconds: a launcher gives the ranks it ends 30, and a hang would last 30 minutes (engine.timeout_minutes)."""

# (what happens, to which rank, at which step, what is said about it, the checkpoint that stands afterwards)
CHAIN = [
    ("killed-in-training", 1, 3, "lost contact with another rank", 2),
    ("full-disk", 1, 4, "rank 1: {}/step-00000004: could not be saved: [Errno 28] No space left on device", 2),
    ("killed-in-saving", 1, 4, "step-00000002 is intact", 2),
    ("error-in-training", 1, 5, "RuntimeError: CUDA out of memory", 4),
    ("bug-in-grader", 1, 5, 'KeyError: "a bug in somebody\'s grader"', 4),
    ("sigterm", 0, 6, "stopping after this step and saving", 6),
]


@dataclass
class Launch:
    code: int
    output: str
    errors: str
    seconds: float


def launch(config: Path, moment: str, rank: int, step: int, *arguments: str) -> Launch:
    faulty = ["-m", "tests.trainer.faulty_rank", moment, rank, step]
    started = time.monotonic()
    done = torchrun(*faulty, "train", config, *arguments, timeout=600, check=False, COLUMNS="300")
    return Launch(done.returncode, done.stdout, done.stderr, time.monotonic() - started)


def close(found: list[dict], expected: list[dict]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            if isinstance(value, float) and not name.startswith("logprob_gap"):  # differences of rounding themselves
                assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
            elif not name.startswith("logprob_gap"):
                assert ours[name] == value, name


@pytest.fixture
def config(tiny_config):
    return tiny_config(grpo__prompts_per_step=3)  # one rank has two prompts, the other one


@pytest.mark.slow
def test_two_ranks_are_one_run_and_survive_what_happens_to_either(config, tmp_path):
    runs = config.parent / "runs"
    whole = launch(config, "never", 0, 0, "name=whole")
    assert whole.code == 0, whole.errors
    lines = [line for line in whole.output.splitlines() if line.startswith(("step ", "report:"))]
    assert len(lines) == 8 + 1  # one rank prints
    assert len(list((runs / "whole" / "tensorboard").iterdir())) == 1

    checkpoints = runs / "hurt" / "checkpoints"
    for i, (moment, rank, step, message, stands) in enumerate(CHAIN):
        hurt = launch(config, moment, rank, step, "name=hurt", *(["--resume"] if i else []))
        said = hurt.output + hurt.errors
        assert hurt.code != 0, moment
        assert hurt.seconds < 2 * whole.seconds + GRACE, (moment, hurt.seconds)
        assert said.count(message.format(checkpoints)) == 1, f"{moment}:\n{said}"
        assert said.count("error: rank") == (moment != "sigterm"), f"{moment}:\n{said}"
        assert max(int(p.name[-8:]) for p in checkpoints.glob("step-*")) == stands, moment
    finished = launch(config, "never", 0, 0, "name=hurt", "--resume")
    assert finished.code == 0, finished.errors

    for file in ("metrics.jsonl", "evals.jsonl"):
        assert numbers(runs / "hurt", file) == numbers(runs / "whole", file)
    for step in range(1, 9):
        name = f"rollouts/step_{step:06d}.jsonl"
        assert (runs / "hurt" / name).read_bytes() == (runs / "whole" / name).read_bytes()
    for rank in range(2):
        name = f"checkpoints/step-00000008/rank-{rank:05d}-000.safetensors"
        assert (runs / "hurt" / name).read_bytes() == (runs / "whole" / name).read_bytes()
    assert not list(checkpoints.glob(".*"))

    # One process: the same run from the start, from the middle, and as an export.
    alone = run_training(load_config(config, ["name=alone", "steps=2"]))
    close(numbers(alone, "metrics.jsonl"), numbers(runs / "whole", "metrics.jsonl")[:2])
    assert (alone / "rollouts/step_000001.jsonl").read_bytes() == (
        runs / "whole" / "rollouts/step_000001.jsonl"
    ).read_bytes()
    shutil.copytree(runs / "whole", runs / "fewer")
    shutil.rmtree(runs / "fewer/checkpoints/step-00000008")
    run_training(load_config(config, ["name=fewer"]), resume=True)
    close(numbers(runs / "fewer", "metrics.jsonl"), numbers(runs / "whole", "metrics.jsonl"))
    result = CliRunner().invoke(app, ["export", str(runs / "whole"), str(tmp_path / "exported")])
    assert result.exit_code == 0, result.output
    parts = [
        load_file(runs / "whole/checkpoints/step-00000008" / f"rank-{r:05d}-000.safetensors")[
            "weight/model.norm.weight"
        ]
        for r in range(2)
    ]
    assert torch.equal(load_file(tmp_path / "exported/model.safetensors")["model.norm.weight"], torch.cat(parts))


def test_what_cannot_run_on_several_ranks_is_refused_before_anything_is_loaded(config):
    from rise_rl.config import ConfigError
    from rise_rl.limits import check_ranks

    check_ranks(load_config(config), 3, has_vllm=False)
    with pytest.raises(ConfigError, match=r"grpo\.prompts_per_step: 3 prompts a step for 4 ranks"):
        check_ranks(load_config(config), 4, has_vllm=False)
    by_transformers = load_config(config, ["engine.zero_stage=3", "rollout.engine=transformers"])
    split = load_config(config, ["engine.zero_stage=3", "rollout.engine=auto"])
    check_ranks(split, 1, has_vllm=False)
    check_ranks(split, 2, has_vllm=True)
    for refused, has_vllm in ((by_transformers, True), (split, False)):
        with pytest.raises(ConfigError, match=r"engine\.zero_stage: 3 on 2 ranks.*use stage 2"):
            check_ranks(refused, 2, has_vllm=has_vllm)
