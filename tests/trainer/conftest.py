from __future__ import annotations

import json

import pytest
import yaml

from tests.tiny import make_tiny

WORDS = ["water", "rain", "bread", "road", "home", "doctor", "city", "river", "cost"]


def row(uid: str, words: list[str]) -> dict:
    rubrics = [
        {
            "criterion": f"use the letter {letter}",
            "points": points,
            "tags": {
                "verifier": "rule",
                "function": "keywords:letter_frequency",
                "parameters": {"letter": letter, "let_frequency": count, "let_relation": "at least"},
            },
        }
        for letter, points, count in [("e", 5, 2), ("a", 3, 3), ("t", 2, 1)]
    ]
    return {
        "prompt": [{"role": "user", "content": f"Write about {' and '.join(words)}."}],
        "data_source": "test",
        "ability": "letters",
        "reward_model": {"style": "rubric", "ground_truth": "", "rubrics": rubrics},
        "extra_info": {"id": uid},
    }


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny tied Qwen3 whose random answers are spread enough to earn different rewards."""
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", "qwen3-tied", scale=4.0)


@pytest.fixture
def tiny_config(tmp_path, tiny_folder):
    """Writes a configuration of a few seconds' run and returns its path. 6 prompts, 2 a step: 3 steps an epoch."""

    def write(**changes):
        for name, count, first in [("train", 6, 0), ("heldout", 2, 6)]:
            rows = [row(f"{name}-{i}", [WORDS[first + i], WORDS[(first + i + 3) % 9]]) for i in range(count)]
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        config = {
            "name": "tiny",
            "model": str(tiny_folder),
            "steps": 8,
            "output": str(tmp_path / "runs"),
            "data": {
                "train": str(tmp_path / "train.jsonl"),
                "heldout": str(tmp_path / "heldout.jsonl"),
                "max_prompt_tokens": 128,
            },
            "grpo": {"prompts_per_step": 2, "group_size": 4},
            "guidance": {"rollouts": 2, "criteria": 2, "budget_tokens": 128, "remove_at": 5, "coefficient": 0.5},
            "rollout": {"max_new_tokens": 24},
            "engine": {"lr": 0.001, "warmup_steps": 0, "micro_batch_tokens": 256},
            "evaluation": {"every": 2, "samples": 2},
            "checkpoint": {"every": 2},
        }
        for key, value in changes.items():
            section, _, name = key.partition("__")
            if name:
                config[section][name] = value
            else:
                config[section] = value
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    return write
