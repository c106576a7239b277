"""TRL's GRPOTrainer with its log-probs and policy loss from rise_kernels: one import differs."""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from tiny import tiny_model, tiny_tokenizer
from trl import GRPOConfig

from rise_rl.integrations.trl import RiseGRPOTrainer as GRPOTrainer


def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
    """The share of even tokens."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def main() -> None:
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=tiny_model(),  # yours: a name or a model, as for TRL
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=output,
                max_steps=3,
                per_device_train_batch_size=8,
                num_generations=8,
                max_completion_length=16,
                learning_rate=1e-3,
                logging_steps=1,
                report_to=[],
                bf16=torch.cuda.is_available(),
                save_strategy="no",
            ),
            train_dataset=Dataset.from_dict({"prompt": ["a b c", "x y z", "e f g"]}),
            processing_class=tiny_tokenizer(),
        )
        trainer.train()
    print("rewards:", [round(row["reward"], 3) for row in trainer.state.log_history if "reward" in row])


if __name__ == "__main__":
    main()
