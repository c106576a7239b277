"""The second half of a step: from weighted sequences to optimizer updates, one a mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rise_engine.policy import PolicyEngine
from rise_engine.sequences import StepStats, TrainSequence, merge
from rise_engine.token_rows import can_matter


def update(policy: PolicyEngine, mini_batches: Sequence[Sequence[TrainSequence]], *, temperature: float) -> StepStats:
    """Learns from a rollout batch: one optimizer update per mini-batch, in order. Collective.

    mini_batches: natural sequences carry no old log-probs yet. The first mini-batch is on policy: its old log-probs are
    its own (ratio exactly 1). For the others they are computed here, before the first update moves the weights, by the
    head that trains. Raises NonFiniteError before anything is updated in the mini-batch it happens in.
    """
    batches = [[s for s in batch if can_matter(s, policy.loss)] for batch in mini_batches]
    batches = [batches[0], *with_old_logprobs(policy, batches[1:], temperature)]
    return merge([policy.train_step(batch, temperature=temperature) for batch in batches])


def with_old_logprobs(
    policy: PolicyEngine, batches: Sequence[Sequence[TrainSequence]], temperature: float
) -> list[list[TrainSequence]]:
    """The same mini-batches, natural sequences with the policy's log-probs as it stands now."""
    natural = [s for batch in batches for s in batch if not s.is_guide]
    found = iter(policy.score(natural, temperature=temperature))
    return [[s if s.is_guide else replace(s, old_logprob=next(found)) for s in batch] for batch in batches]
