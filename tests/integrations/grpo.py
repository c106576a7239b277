"""A few steps of TRL's GRPOTrainer on a tiny model, alike for every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig


def letters(completions: list[str], **_: Any) -> list[float]:
    return [float(text.count("e")) - 0.1 * len(text) for text in completions]


def make_trainer(cls: type, folder: Path, output: Path, *, model: Any = None, peft_config: Any = None, **options: Any):
    """A trainer of `cls` on the tiny model in `folder`; `options` go to GRPOConfig."""
    settings: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": 5,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 10,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "seed": 3,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return cls(
        model=model or str(folder),
        reward_funcs=letters,
        args=GRPOConfig(**settings | options),
        train_dataset=Dataset.from_dict({"prompt": [f"Write {'a story ' * (i % 3)}about {i}" for i in range(16)]}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=peft_config,
    )


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def logged(trainer: Any) -> list[dict[str, float]]:
    """Every metric of every step, but times."""
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [{k: v for k, v in row.items() if "time" not in k} for row in rows]


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
