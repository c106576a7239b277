"""The rollout interface: prompts as token ids in, sampled token ids with their behaviour log-probs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """temperature > 0 (0 is greedy and refused in training); top_p 1 and top_k 0 mean the full distribution.

    subset: asks by name for top_p < 1 or top_k > 0, which are refused without it. The log-probs of a rollout are those
    of the full distribution at this temperature even so.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    subset: bool = False


@dataclass(frozen=True)
class RolloutRequest:
    """One answer to sample. Equal (prompt_ids, seed, sampling, weights) give equal tokens, whatever the batch."""

    uid: str
    index: int
    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Rollout:
    """What was sampled. Training uses `token_ids` as they are: the text is for graders and people only.

    token_ids includes the stop token when finish_reason is "stop". logprobs: behaviour log-prob of each token under
    the processed distribution (temperature applied). weight_version: the optimizer step of the weights it came from.
    """

    uid: str
    index: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    weight_version: int


class RolloutStream(Protocol):
    """Requests under way, to which more may be added."""

    @property
    def pending(self) -> int:
        """How many have no answer yet."""

    def add(self, requests: Sequence[RolloutRequest]) -> list[int]:
        """Begins them; returns a ticket for each, by which `advance` names its answer."""

    def advance(self) -> list[tuple[int, Rollout]]:
        """Works for a while; returns what has finished, which may be nothing."""


class RolloutEngine(Protocol):
    """`sync(version)` takes the trainer's current weights; generating before the first sync is an error.

    `release` gives what the engine holds of a GPU back to the trainer, until the next sync.
    """

    def sync(self, version: int) -> None: ...

    def release(self) -> None: ...

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        sampling: Sampling,
        progress: Callable[[int], None] | None = None,
    ) -> list[Rollout]:
        """In the order of the requests; `progress` is told how many have finished."""

    def withdraw(self, error: Exception) -> None:
        """In place of a `generate` that this rank cannot come to: ranks that wait for its requests raise `error`."""

    def stream(self, sampling: Sampling) -> AbstractContextManager[RolloutStream]:
        """Answers as they finish. What has none on leaving is dropped."""
