"""What every rollout engine refuses, in the same words."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import EngineError
from .base import RolloutRequest, Sampling

COLDEST = 0.01
"""vLLM samples at this temperature where a lower one is asked for; log-probs would then be of another distribution."""


class RolloutError(EngineError):
    """Answers cannot be sampled; the message says why and what to do. Nothing was trained on meanwhile."""


class RequestError(RolloutError, ValueError):
    """A request that can never be served."""


def check_version(synced: int | None, policy_step: int) -> int:
    """The version that answers are stamped with. Raises RuntimeError before the first sync and with old weights."""
    if synced is None:
        raise RuntimeError("rollouts: generate() before the first sync(); the engine has no weights yet")
    if synced != policy_step:
        raise RuntimeError(f"rollouts: synced at step {synced}, but the policy is at {policy_step}; call sync() first")
    return synced


def check_requests(requests: Sequence[RolloutRequest], sampling: Sampling, context_length: int) -> None:
    """RequestError for sampling or prompts that cannot be served."""
    if not (sampling.temperature == 0 or sampling.temperature >= COLDEST):
        raise RequestError(
            f"sampling: temperature must be 0 (greedy) or at least {COLDEST}, found {sampling.temperature}"
        )
    if sampling.max_new_tokens < 1:
        raise RequestError(f"sampling: max_new_tokens must be >= 1, found {sampling.max_new_tokens}")
    for request in requests:
        needed = len(request.prompt_ids) + sampling.max_new_tokens
        if not request.prompt_ids:
            raise RequestError(f"request {request.uid!r}: the prompt is empty")
        if needed > context_length:
            raise RequestError(
                f"request {request.uid!r}: a prompt of {len(request.prompt_ids)} tokens and max_new_tokens "
                f"{sampling.max_new_tokens} need {needed} tokens; the context is {context_length}"
            )


def check_subset(sampling: Sampling) -> None:
    if (sampling.top_p < 1 or sampling.top_k > 0) and not sampling.subset:
        raise RequestError(
            f"sampling: top_p {sampling.top_p}, top_k {sampling.top_k}: only the full distribution is sampled "
            "from, as log-probs would otherwise be renormalised over a subset that the trainer does not know"
        )
