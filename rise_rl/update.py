"""The second half of a step: from weighted sequences to optimizer updates, one a mini-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from rise_engine import agreement
from rise_engine.distributed import all_ranks_sum
from rise_engine.policy import PolicyEngine
from rise_engine.sequences import StepStats, TrainSequence, merge
from rise_engine.sharding import share
from rise_engine.token_rows import can_matter
from rise_kernels.token_losses import LOG_RATIO_BOUND

MiniBatches = list[list[TrainSequence]]


class Scorer(Protocol):
    """What log-probs are asked of: the policy, or the frozen reference."""

    def score(self, sequences: Sequence[TrainSequence], *, temperature: float) -> list[Tensor]: ...


def update(
    policy: PolicyEngine,
    mini_batches: Sequence[Sequence[TrainSequence]],
    *,
    temperature: float,
    reference: Scorer | None = None,
    sequence_cap: float | None = None,
) -> StepStats:
    """Learns from a rollout batch: one optimizer update per mini-batch, in order. Collective.

    mini_batches: the whole step's, the same on every rank; natural sequences carry neither old nor reference log-probs
    yet. Old ones: the first mini-batch is on policy and its ratio exactly 1; for the others they are computed here,
    before any weight moves, by the head that trains. reference: where the loss has a KL term. sequence_cap: importance
    correction of whole responses, truncated there. Raises NonFiniteError before anything is updated in the mini-batch
    it happens in.
    """
    batches = [my_share([s for s in batch if can_matter(s, policy.loss)], policy) for batch in mini_batches]
    kept = math.nan
    if sequence_cap is not None:
        batches = scored(batches, "old_logprob", policy, temperature)
        batches, kept = corrected(batches, sequence_cap, policy.device)
        batches[0] = [replace(s, old_logprob=None) for s in batches[0]]
    else:
        batches[1:] = scored(batches[1:], "old_logprob", policy, temperature)
    if reference is not None:
        batches = scored(batches, "ref_logprob", reference, temperature)
    stats = merge([policy.train_step(batch, temperature=temperature) for batch in batches])
    return stats if sequence_cap is None else replace(stats, importance_kept=kept)


def my_share(sequences: Sequence[TrainSequence], policy: PolicyEngine) -> list[TrainSequence]:
    """What this rank trains on; every rank holds all the sequences."""
    return share(
        sequences,
        rank=policy.rank,
        world_size=policy.world_size,
        budget=policy.config.micro_batch_tokens,
        layout=policy.layout,
    )


def scored(
    batches: Sequence[Sequence[TrainSequence]],
    name: Literal["old_logprob", "ref_logprob"],
    scorer: Scorer,
    temperature: float,
) -> MiniBatches:
    """The same mini-batches, natural sequences with the scorer's log-probs under `name`."""
    if not batches:
        return []
    natural = [s for batch in batches for s in batch if not s.is_guide]
    found = iter(scorer.score(natural, temperature=temperature))
    return [[s if s.is_guide else replace(s, **{name: next(found)}) for s in batch] for batch in batches]


def corrected(
    batches: Sequence[Sequence[TrainSequence]], cap: float, device: torch.device
) -> tuple[MiniBatches, float]:
    """Natural sequences with their importance factor, and the share of them (over all ranks) below the cap.

    The factor is min(prod_t pi_old(t) / pi_behaviour(t), cap), a constant. It multiplies the surrogate and not the KL,
    and a positive factor of the surrogate is one of the advantage: clipping looks at the ratio and at the sign alone.
    """
    counts = torch.zeros(2, dtype=torch.float64)

    def with_factor(sequence: TrainSequence) -> TrainSequence:
        if sequence.is_guide:
            return sequence
        if sequence.behaviour_logprob is None:
            raise ValueError(f"behaviour_logprob: sequence {sequence.uid!r} has none, which its correction needs")
        old = torch.as_tensor(sequence.old_logprob, dtype=torch.float64)
        behaviour = torch.as_tensor(sequence.behaviour_logprob, dtype=torch.float64)
        log_factor = (old - behaviour).sum().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).item()
        counts[0] += log_factor <= math.log(cap)
        counts[1] += 1
        return replace(sequence, advantage=sequence.advantage * min(math.exp(log_factor), cap))

    changed = agreement.each(lambda: [[with_factor(s) for s in batch] for batch in batches])
    below, total = all_ranks_sum(counts.to(device)).tolist()
    return changed, below / total if total else math.nan
