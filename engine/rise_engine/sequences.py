"""What one optimizer step is made of: sequences with their token weights already worked out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainSequence:
    """One response under one prompt, as sampled; for a guide row the prompt is the original one, without the hint.

    token_weight: the weight of every token of the response, all normalisers inside (nothing later divides).
    advantage: of a natural row; guide rows use token_weight alone.
    old_logprob, ref_logprob, behaviour_logprob: one value per response token, or None. old_logprob None: the policy's
    own, so that the ratio is 1. behaviour_logprob (the rollout engine's) is always used for the log-prob gap, and for
    importance correction where the loss asks for it.
    """

    uid: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    token_weight: float
    advantage: float = 0.0
    is_guide: bool = False
    old_logprob: Sequence[float] | None = None
    behaviour_logprob: Sequence[float] | None = None
    ref_logprob: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"sequence {self.uid!r}: prompt_ids is empty; the first token needs something before it")
        if not self.response_ids:
            raise ValueError(f"sequence {self.uid!r}: response_ids is empty")
        for name in ("old_logprob", "behaviour_logprob", "ref_logprob"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.response_ids):
                raise ValueError(
                    f"sequence {self.uid!r}: {name} has {len(values)} values for {len(self.response_ids)} tokens"
                )

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class StepStats:
    """What one `train_step` did. Means are over the tokens that were forwarded; NaN where there were none.

    loss = policy_loss + guide_loss, the weighted sums over all ranks. grad_norm: before clipping; 0 if the step was
    skipped. lr: the rate the update used. tokens: response tokens forwarded. clip_fraction, ratio_*, kl and entropy
    are over natural tokens, mean_support (rho) over guide tokens. logprob_gap_*: |trainer - behaviour| in nats over
    forwarded tokens that carry a behaviour log-prob.
    """

    loss: float
    policy_loss: float
    guide_loss: float
    grad_norm: float
    lr: float
    tokens: int
    forwarded_sequences: int
    micro_batches: int
    skipped: bool
    clip_fraction: float
    mean_support: float
    entropy: float
    ratio_mean: float
    ratio_max: float
    kl: float
    logprob_gap_mean: float
    logprob_gap_p99: float
    logprob_gap_max: float
    seconds: float
