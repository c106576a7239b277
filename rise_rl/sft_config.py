"""The keys of `rise-rl sft`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from .config import Config, DataConfig, Fraction, Positive, RunConfig, load_as

if TYPE_CHECKING:
    from .run_folder import RunFolder


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


def run_config(run: RunFolder) -> RunConfig:
    """The configuration of a run, whichever command wrote it. RunFolderError for a folder that is no run."""
    model = SftConfig if of_sft(run.config()) else Config
    return load_as(model, run.path / "config.yaml", [])


def of_sft(config: Mapping[str, Any]) -> bool:
    """Whether a run folder's config.yaml, of whatever version, is one of `rise-rl sft`."""
    return "answers_per_step" in config
