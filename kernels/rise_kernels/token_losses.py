"""The token losses: value and derivative with respect to the token's log-prob. Every backend uses this file.

Both losses of RISE-RL are functions of one number per token, log p, so a fused head only needs dloss/dlogp to form
all its gradients: dloss/dz = token_weight * dloss/dlogp * (onehot(target) - softmax(z)).
Equations and where each choice comes from: docs/math.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

KlEstimator = Literal["k1", "k2", "k3", "k3_ratio"]
GuideKind = Literal["log_support", "support", "logprob"]

LOG_RATIO_BOUND = 20.0  # as verl: exp(20) is finite in every format we use, and no honest ratio is near it


@dataclass(frozen=True)
class LossSpec:
    """The scalars of both losses. Policy: PPO-clip (clip_low, clip_high, dual_clip), KL and importance correction.

    guide: the guide loss of a token, -log rho ("log_support", RISE), -rho ("support", LUFFY) or -log p ("logprob").
    """

    gamma: float = 0.1
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    is_cap: float | None = None
    guide: GuideKind = "log_support"


@dataclass(frozen=True)
class TokenRows:
    """Per-token inputs, float32 [n] unless said otherwise. A value that a row does not use may be NaN.

    is_guide: bool [n]; guide rows use token_weight only. old_logprob None: the row's own log-prob, detached (ratio 1).
    """

    token_weight: Tensor
    is_guide: Tensor
    advantage: Tensor | None = None
    old_logprob: Tensor | None = None
    ref_logprob: Tensor | None = None
    behaviour_logprob: Tensor | None = None

    def map(self, f: Callable[[Tensor], Tensor]) -> TokenRows:
        """f of every vector that is given."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return TokenRows(**{name: None if x is None else f(x) for name, x in given.items()})


class TokenLosses(NamedTuple):
    """float32 [n], not yet weighted; `clipped` bool [n].

    ratio, clipped and kl are 0 on guide rows, support is 0 on policy rows; kl is None without ref_logprob.
    """

    loss: Tensor
    dloss: Tensor
    ratio: Tensor
    clipped: Tensor
    support: Tensor
    kl: Tensor | None


def support_factor(logprob: Tensor, gamma: float) -> Tensor:
    """rho = p / (p + gamma) (paper eq. 10), without forming p / gamma.

    Differentiable. Any float tensor; computed in float32 or better. Raises ValueError unless gamma > 0.
    """
    check_gamma(gamma)
    return torch.sigmoid(_at_least_float32(logprob) - math.log(gamma))


def check_gamma(gamma: float) -> None:
    if not (gamma > 0 and math.isfinite(gamma)):
        raise ValueError(f"gamma: expected a finite number > 0, found {gamma!r}")


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def guide_loss(logprob: Tensor, gamma: float, kind: GuideKind = "log_support") -> tuple[Tensor, Tensor]:
    """The guide loss and its derivative, by way of log gamma - logp: -log rho and -gamma / (p + gamma) (paper eq. 11);
    "support" -rho and -p gamma / (p + gamma)^2; "logprob" -log p and -1.
    """
    x = math.log(gamma) - logprob
    if kind == "support":
        rho = torch.sigmoid(-x)
        return -rho, -rho * torch.sigmoid(x)
    if kind == "logprob":
        return -logprob, torch.full_like(logprob, -1.0)
    return softplus(x), -torch.sigmoid(x)


def kl_estimate(
    logprob: Tensor, ref_logprob: Tensor, old_logprob: Tensor, estimator: KlEstimator
) -> tuple[Tensor, Tensor]:
    """Schulman's k1, k2, k3 estimates of KL(policy || reference) and their derivatives; "k3_ratio" is k3 times
    exp(logprob - old_logprob) (DeepSeek-V3.2's unbiased estimate, TRL's bias correction), old_logprob constant.
    """
    raw = logprob - ref_logprob
    diff = raw.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    inside = (raw == diff).to(diff.dtype)
    if estimator == "k1":
        return diff, inside
    if estimator == "k2":
        return 0.5 * diff * diff, diff * inside
    slope = torch.expm1(-diff)
    if estimator == "k3_ratio":
        free = logprob - old_logprob
        log_ratio = free.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        # r (k3 + dk3) = r diff: the two exponentials cancel, so they are never formed
        return log_ratio.exp() * (slope + diff), torch.where(free == log_ratio, log_ratio.exp() * diff * inside, 0.0)
    return slope + diff, -slope * inside


def policy_loss(
    logprob: Tensor, rows: TokenRows, spec: LossSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """PPO-clip with separate bounds and optional dual clip, plus KL: (loss, dloss, ratio, clipped, kl).

    At a ratio exactly on a bound both branches agree and the unclipped one counts, so its gradient flows. Importance
    correction min(exp(old - behaviour), is_cap) multiplies the surrogate, not the KL (as verl and TRL).
    """
    advantage = rows.advantage
    if advantage is None:
        raise ValueError("advantage: expected one value per policy row, found None")
    old = logprob if rows.old_logprob is None else rows.old_logprob
    raw = logprob - old
    log_ratio = raw.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    free = -advantage * ratio
    bound = -advantage * ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    clipped = bound > free
    loss = torch.where(clipped, bound, free)
    if spec.dual_clip is not None:
        floor = -advantage * spec.dual_clip
        lower = (advantage < 0) & (floor < loss)
        loss, clipped = torch.where(lower, floor, loss), clipped | lower
    dloss = torch.where(clipped | (raw != log_ratio), 0.0, free)
    if rows.behaviour_logprob is not None:
        factor = (old - rows.behaviour_logprob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        if spec.is_cap is not None:
            factor = factor.clamp(max=spec.is_cap)
        loss, dloss = loss * factor, dloss * factor
    kl = None
    if rows.ref_logprob is not None:
        kl, dkl = kl_estimate(logprob, rows.ref_logprob, old, spec.kl_estimator)
        if spec.kl_coef:
            loss, dloss = loss + spec.kl_coef * kl, dloss + spec.kl_coef * dkl
    return loss, dloss, ratio, clipped, kl


@torch.no_grad()
def token_losses(logprob: Tensor, rows: TokenRows, spec: LossSpec) -> TokenLosses:
    """Both losses, each row taking the one that `is_guide` names (selected, so unused NaNs never spread)."""
    guide = rows.is_guide
    guide_value, guide_slope = guide_loss(logprob, spec.gamma, spec.guide)
    support = torch.where(guide, torch.sigmoid(logprob - math.log(spec.gamma)), 0.0)
    if rows.advantage is None:
        zero = torch.zeros_like(logprob)
        return TokenLosses(guide_value, guide_slope, zero, torch.zeros_like(guide), support, None)
    value, slope, ratio, clipped, kl = policy_loss(logprob, rows, spec)
    return TokenLosses(
        loss=torch.where(guide, guide_value, value),
        dloss=torch.where(guide, guide_slope, slope),
        ratio=torch.where(guide, 0.0, ratio),
        clipped=clipped & ~guide,
        support=support,
        kl=None if kl is None else torch.where(guide, 0.0, kl),
    )


def loss_parts(losses: TokenLosses, rows: TokenRows) -> tuple[Tensor, Tensor]:
    """The weighted sums over policy rows and over guide rows, float32 scalars; the loss is their sum."""
    weighted = rows.token_weight * losses.loss
    return torch.where(rows.is_guide, 0.0, weighted).sum(), torch.where(rows.is_guide, weighted, 0.0).sum()
