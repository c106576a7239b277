"""Which prompts a step takes: a pure function of (seed, step), so that a resumed run has nothing to remember."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rise_engine.seeds import derive_seed

from .config import ConfigError
from .data import Example


def enough(examples: Sequence[Example], batch_size: int, key: str) -> None:
    """ConfigError if there are too few for one step. key: what batch_size is called in the configuration."""
    if len(examples) < batch_size:
        raise ConfigError(f"{key}: {batch_size} prompts a step, but the training data has only {len(examples)}")


@dataclass(frozen=True)
class PromptOrder:
    """Epochs of whole batches. What does not fill a batch at an epoch's end is left out of that epoch (as verl), so a
    step never holds a prompt twice; shuffling decides anew each epoch what that is. key: what batch_size is called in
    the configuration.
    """

    examples: Sequence[Example]
    batch_size: int
    seed: int
    shuffle: bool = True
    key: str = "grpo.prompts_per_step"

    def __post_init__(self) -> None:
        enough(self.examples, self.batch_size, self.key)

    @property
    def steps_per_epoch(self) -> int:
        return len(self.examples) // self.batch_size

    def batch(self, step: int) -> list[Example]:
        """The prompts of step `step`, counted from 0."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = list(range(len(self.examples)))
        if self.shuffle:
            random.Random(derive_seed("epoch", self.seed, epoch)).shuffle(order)
        start = position * self.batch_size
        return [self.examples[i] for i in order[start : start + self.batch_size]]
