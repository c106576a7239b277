"""Do rollout engine and trainer hold the same weights and count log-probs alike? Asked after every sync."""

from __future__ import annotations

import math

import torch

from .errors import EngineError
from .policy import PolicyEngine
from .rollout.base import RolloutEngine, RolloutRequest, Sampling

PROBE_TEXT = "The quick brown fox jumps over the lazy dog, and"
PROBE_TOKENS = 8
PROBE_TEMPERATURE = 0.7
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Nats. bfloat16 logits of size 20 are rounded by up to 1/16, and a sampled token can be far down the tail."""


class ParityError(EngineError):
    """Rollout engine and trainer disagree about the log-probs of the same tokens."""


def parity_probe(rollouts: RolloutEngine, policy: PolicyEngine, *, tolerance: float | None = None) -> float:
    """Largest |engine - trainer| log-prob over a short answer to a fixed prompt; ParityError above `tolerance` nats
    (None: TOLERANCE of the policy's type).

    The temperature is not 1, so that raw log-probs reported for tempered samples show up; the answer is sampled with
    the same seed every time, through the engine's public `generate`, so that any engine can be probed.
    """
    tolerance = tolerance or TOLERANCE[policy.config.torch_dtype]
    prompt = tuple(policy.tokenizer.encode(PROBE_TEXT))
    sampling = Sampling(max_new_tokens=PROBE_TOKENS, temperature=PROBE_TEMPERATURE)
    [rollout] = rollouts.generate([RolloutRequest("parity-probe", 0, prompt, seed=0)], sampling)
    [expected] = policy.logprobs(prompt, [rollout.token_ids], temperature=PROBE_TEMPERATURE)
    gaps = [abs(a - b) for a, b in zip(rollout.logprobs, expected.tolist(), strict=True)]
    worst = max(gaps)
    if rollout.weight_version != policy.step:
        raise ParityError(
            f"the rollout engine answers with weights of step {rollout.weight_version}, the policy is at {policy.step}"
        )
    if not (math.isfinite(worst) and worst <= tolerance):
        raise ParityError(
            f"rollout engine and trainer disagree at step {policy.step}: log-probs of the same {len(gaps)} tokens "
            f"differ by up to {worst:.3g} nats (allowed: {tolerance:.3g}). Look at: a weight sync that did not reach "
            "every tensor (a tied lm_head is sent separately), a prefix cache kept over an update, log-probs taken "
            "before the temperature, or engine and trainer in different dtypes (then raise the tolerance)"
        )
    return worst
