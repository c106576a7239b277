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
PROBE_ANSWERS = 8
PROBE_TOKENS = 4
"""Short answers at once: as many tokens as a long one in a fraction of the passes, and they share a prefix."""
PROBE_TEMPERATURE = 2.0
"""Hot, so that the tokens come from the whole distribution. A prompt that repeats itself is continued with certainty at
0.7, and a certain token has log-prob 0 whatever the temperature and nearly whatever the weights.
"""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Nats, on average over the probe's tokens.

float32: sums in another order, measured 2e-5 on a whole answer of a 135M model; several times that is still far below
any fault. bfloat16: engine and trainer round hidden states differently, and vLLM on a CPU rounds its logits: one of
size 16 to 32 by up to 1/16, which is 1/32 on average and, divided by the probe's temperature, 1/64. Measured there with
a 135M model of 30 layers and logits up to 29: 0.021, and 0.10 at most; log-probs of untempered samples differ by 2.2.
Twice that for logits twice as large, and twice again for deeper models and other kernels. On a GPU, where vLLM's head
works in float32 as the trainer's does, less is to be expected; nothing has been measured.
"""
LARGEST = 10
"""A single token may differ by so many times the tolerance: 1e-3 in float32, 1 in bfloat16, where a token far down
the tail can be off by several roundings. The average is what tells a fault from rounding: a fault moves every token.
"""


class ParityError(EngineError):
    """Rollout engine and trainer disagree about the log-probs of the same tokens."""


def parity_probe(
    rollouts: RolloutEngine, policy: PolicyEngine | FrozenPolicy, *, tolerance: float | None = None
) -> float:
    """Largest |engine - trainer| log-prob over short answers to a fixed prompt, over the engines of all ranks.

    ParityError, on every rank and naming the wrong ones, where the mean is above `tolerance` nats (None: TOLERANCE of
    the policy's type) or one token above LARGEST times that, or answers are stamped with another step than the
    policy's. The stamp is what tells weights of the step before: one update at a rate of 1e-6 moves log-probs by less
    than bfloat16 rounds them.

    The temperature is not 1, so that raw log-probs reported for tempered samples show up; the prompt is the same every
    time and longer than a block of a prefix cache, so that blocks kept over an update do. It goes through the engine's
    public `generate`, so that any engine can be probed. Collective.
    """
    tolerance = tolerance or TOLERANCE[policy.model.dtype]
    prompt = probe_prompt(policy)
    sampling = Sampling(max_new_tokens=PROBE_TOKENS, temperature=PROBE_TEMPERATURE)
    requests = [RolloutRequest("parity-probe", i, prompt, seed=i) for i in range(PROBE_ANSWERS)]
    answers = agreement.each(rollouts.generate, requests, sampling)
    expected = policy.logprobs(prompt, [a.token_ids for a in answers], temperature=PROBE_TEMPERATURE)
    gaps = torch.cat([(torch.tensor(a.logprobs) - e).abs() for a, e in zip(answers, expected, strict=True)])
    versions = {a.weight_version for a in answers}
    found = agreement.gather(lambda: (gaps.mean().item(), gaps.max().item(), versions))
    complaints = []
    for rank, (average, largest, stamps) in enumerate(found):
        name = "the rollout engine" if len(found) == 1 else f"the rollout engine of rank {rank}"
        if stamps != {policy.step}:
            steps = ", ".join(map(str, sorted(stamps)))
            complaints.append(f"{name} answers with weights of step {steps}, the policy is at {policy.step}")
        elif not (math.isfinite(largest) and average <= tolerance and largest <= LARGEST * tolerance):
            complaints.append(
                f"{name} and the trainer differ by {average:.3g} nats on average and up to {largest:.3g} (allowed: "
                f"{tolerance:.3g} and {LARGEST * tolerance:.3g})"
            )
    if complaints:
        error = ParityError(
            f"rollout engine and trainer disagree at step {policy.step} about log-probs of the same {len(gaps)} "
            f"tokens: {'; '.join(complaints)}. Look at: a weight sync that did not reach every tensor (a tied lm_head "
            "is sent separately) or was skipped, a prefix cache kept over an update, log-probs taken before the "
            "temperature, or engine and trainer in different dtypes (then raise rollout.parity_tolerance)"
        )
        raise agreement.everywhere(error)
    return max(largest for _, largest, _ in found)


def probe_prompt(policy: PolicyEngine | FrozenPolicy) -> tuple[int, ...]:
    text = policy.tokenizer.encode(PROBE_TEXT)
    return tuple(islice(cycle(text), min(PROBE_PROMPT, policy.context_length - PROBE_TOKENS)))
