"""The keys of `rise-rl sft`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from .config import Config, DataConfig, Fraction, Positive, RunConfig, load_as


class SftDataConfig(DataConfig):
    answer: str = Field("answer", description="The column of the data file that holds the answer to learn.")
    max_answer_tokens: Positive = Field(8192, description="Longest answer, in tokens; treated as an overlong prompt.")
    validation: Fraction = Field(
        0.01,
        description="Share of data.train kept apart for the validation loss (at least one row) without data.heldout.",
    )


class SftConfig(RunConfig):
    """A run of `rise-rl sft`."""

    data: SftDataConfig
    epochs: Positive = Field(3, description="Passes over the training answers.")
    answers_per_step: Positive = Field(64, description="Answers of one optimizer update.")
    validate_every: Positive = Field(50, description="Steps between validation losses; also taken before and after.")


def run_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config.yaml of a run folder, whichever command wrote it."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    model = SftConfig if any(line.startswith("answers_per_step:") for line in text.splitlines()) else Config
    return load_as(model, path, overrides)
