"""The one place that divides: a step's normalisers, turned into one weight per token before any forward pass.

The loss of a step is sum_t weight_t * l_t (l_t: the token's policy or guide loss). All counts here are over the whole
optimizer step and all ranks, so micro-batching, packing and rank count cannot change the loss except by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass(frozen=True)
class StepWeights:
    """Weights of every sequence of one optimizer step; each holds for all tokens of its response.

    natural_lengths: response tokens of every natural sample that counts (graded, not masked; an advantage of 0 still
    counts, as in verl). prompts: prompts of the step, with or without kept guided samples (eq. 11). guide_coefficient:
    lambda(s) of eq. 12. norm_length: the constant divisor of "seq-mean-token-sum-norm" (Dr. GRPO), in tokens.
    """

    natural_lengths: Sequence[int]
    prompts: int
    guide_coefficient: float
    aggregation: Aggregation = "token-mean"
    norm_length: int | None = None

    def __post_init__(self) -> None:
        if self.prompts < 1:
            raise ValueError(f"prompts: expected at least 1, found {self.prompts}")
        if min(self.natural_lengths, default=1) < 1:
            raise ValueError("natural_lengths: expected at least 1 token per response, found 0")
        if self.aggregation == "seq-mean-token-sum-norm" and not self.norm_length:
            raise ValueError('norm_length: "seq-mean-token-sum-norm" needs a positive number of tokens')

    def natural(self, length: int) -> float:
        """The weight of each token of a natural response of `length` tokens."""
        if self.aggregation == "token-mean":
            return 1.0 / sum(self.natural_lengths)
        per_sequence = length if self.aggregation == "seq-mean-token-mean" else self.norm_length
        assert per_sequence
        return 1.0 / (len(self.natural_lengths) * per_sequence)

    def guided(self, gain: float, length: int, kept: int) -> float:
        """The weight of each token of a kept guided response: lambda * gain / (prompts * kept * length) (eq. 11, 12).

        gain: clipped A_ref of eq. 8. kept: |O_ref|, guided samples of the same prompt with a positive gain.
        """
        return self.guide_coefficient * gain / (self.prompts * kept * length)
