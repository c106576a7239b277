"""Do rollout engine and trainer hold the same weights and count log-probs alike? Asked after every sync."""

from __future__ import annotations

import math
from itertools import cycle, islice

import torch

from . import agreement
from .errors import EngineError
from .frozen import FrozenPolicy
from .policy import PolicyEngine
from .rollout.base import RolloutEngine, RolloutRequest, Sampling

PROBE_TEXT = "The quick brown fox jumps over the lazy dog, and"
PROBE_PROMPT = 96
"""Tokens of the prompt (the text again and again): several blocks of a prefix cache, so that stale ones are met."""
PROBE_TOKENS = 8
PROBE_TEMPERATURE = 0.7
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Nats. bfloat16 logits of size 20 are rounded by up to 1/16, and a sampled token can be far down the tail."""


class ParityError(EngineError):
    """Rollout engine and trainer disagree about the log-probs of the same tokens."""


def parity_probe(
    rollouts: RolloutEngine, policy: PolicyEngine | FrozenPolicy, *, tolerance: float | None = None
) -> float:
    """Largest |engine - trainer| log-prob over a short answer to a fixed prompt, over the engines of all ranks.

    ParityError above `tolerance` nats (None: TOLERANCE of the policy's type), on every rank, naming the wrong ones.

    The temperature is not 1, so that raw log-probs reported for tempered samples show up; the prompt is the same every
    time and longer than a block of a prefix cache, so that blocks kept over an update do. It goes through the engine's
    public `generate`, so that any engine can be probed. Collective.
    """
    tolerance = tolerance or TOLERANCE[policy.model.dtype]
    prompt = probe_prompt(policy)
    sampling = Sampling(max_new_tokens=PROBE_TOKENS, temperature=PROBE_TEMPERATURE)
    requests = [RolloutRequest("parity-probe", 0, prompt, seed=0)]
    [rollout] = agreement.each(rollouts.generate, requests, sampling)
    [expected] = policy.logprobs(prompt, [rollout.token_ids], temperature=PROBE_TEMPERATURE)
    worst = max(abs(a - b) for a, b in zip(rollout.logprobs, expected.tolist(), strict=True))
    found = agreement.gather(lambda: (worst, rollout.weight_version))
    complaints = []
    for rank, (gap, version) in enumerate(found):
        name = "the rollout engine" if len(found) == 1 else f"the rollout engine of rank {rank}"
        if version != policy.step:
            complaints.append(f"{name} answers with weights of step {version}, the policy is at {policy.step}")
        elif not (math.isfinite(gap) and gap <= tolerance):
            complaints.append(f"{name} and the trainer differ by up to {gap:.3g} nats (allowed: {tolerance:.3g})")
    if complaints:
        raise ParityError(
            f"rollout engine and trainer disagree at step {policy.step} about log-probs of the same {PROBE_TOKENS} "
            f"tokens: {'; '.join(complaints)}. Look at: a weight sync that did not reach every tensor (a tied lm_head "
            "is sent separately) or was skipped, a prefix cache kept over an update, log-probs taken before the "
            "temperature, or engine and trainer in different dtypes (then raise the tolerance)"
        )
    return max(gap for gap, _ in found)


def probe_prompt(policy: PolicyEngine | FrozenPolicy) -> tuple[int, ...]:
    text = policy.tokenizer.encode(PROBE_TEXT)
    return tuple(islice(cycle(text), min(PROBE_PROMPT, policy.context_length - PROBE_TOKENS)))
