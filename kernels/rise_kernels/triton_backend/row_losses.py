"""The token losses as device functions: the same formulas as `rise_kernels.token_losses`, term by term.

The torch form is the definition; a test draws every option and boundary and compares the two. Guide and policy rows are
selected, never blended, so a value that a row does not use may be NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..token_losses import LOG_RATIO_BOUND
from .elementary import clamp, expm1, sigmoid, softplus

BOUND = tl.constexpr(LOG_RATIO_BOUND)


@triton.jit
def guide_loss(logprob, log_gamma, KIND: tl.constexpr):
    """(guide loss, its derivative, rho); KIND is "log_support", "support" or "logprob"."""
    x = log_gamma - logprob
    rho = sigmoid(-x)
    if KIND == "support":
        return -rho, -rho * sigmoid(x), rho
    elif KIND == "logprob":
        return -logprob, tl.zeros_like(x) - 1.0, rho
    else:
        return softplus(x), -sigmoid(x), rho


@triton.jit
def kl_estimate(logprob, ref_logprob, old_logprob, ESTIMATOR: tl.constexpr):
    """(KL estimate, its derivative); ESTIMATOR is "k1", "k2", "k3" or "k3_ratio"."""
    raw = logprob - ref_logprob
    diff = clamp(raw, -BOUND, BOUND)
    inside = tl.where(raw == diff, 1.0, 0.0)
    if ESTIMATOR == "k1":
        return diff, inside
    elif ESTIMATOR == "k2":
        return 0.5 * diff * diff, diff * inside
    elif ESTIMATOR == "k3_ratio":
        free = logprob - old_logprob
        log_ratio = clamp(free, -BOUND, BOUND)
        ratio = tl.exp(log_ratio)
        return ratio * (expm1(-diff) + diff), tl.where(free == log_ratio, ratio * diff * inside, 0.0)
    else:
        slope = expm1(-diff)
        return slope + diff, -slope * inside


@triton.jit
def surrogate(logprob, old_logprob, advantage, ratio_low, ratio_high, dual_clip, HAS_DUAL: tl.constexpr):
    """PPO-clip with the ratio held in [ratio_low, ratio_high]: (loss, its derivative, ratio, clipped)."""
    raw = logprob - old_logprob
    log_ratio = clamp(raw, -BOUND, BOUND)
    ratio = tl.exp(log_ratio)
    free = -advantage * ratio
    bound = -advantage * clamp(ratio, ratio_low, ratio_high)
    clipped = bound > free
    loss = tl.where(clipped, bound, free)
    if HAS_DUAL:
        floor = -advantage * dual_clip
        lower = (advantage < 0) & (floor < loss)
        loss = tl.where(lower, floor, loss)
        clipped = clipped | lower
    slope = tl.where(clipped | (raw != log_ratio), 0.0, free)
    return loss, slope, ratio, clipped


@triton.jit
def importance_factor(old_logprob, behaviour_logprob, is_cap, HAS_CAP: tl.constexpr):
    """exp(old - behaviour), truncated at is_cap."""
    factor = tl.exp(clamp(old_logprob - behaviour_logprob, -BOUND, BOUND))
    if HAS_CAP:
        factor = tl.where(factor > is_cap, is_cap, factor)
    return factor
