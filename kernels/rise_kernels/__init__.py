"""Fused linear log-prob and the losses of RISE-RL. Needs torch, and triton where there is a GPU; nothing else.

`linear_logprob`, `linear_guide_loss`, `linear_policy_loss` and `linear_rise_loss` take hidden states and the head's
weight and never form the [N, V] logits (see `rise_kernels.api`); the Linear*Loss classes are their module forms.
"""

from .api import linear_guide_loss, linear_logprob, linear_policy_loss, linear_rise_loss
from .backend import Options
from .modules import LinearGuideLoss, LinearPolicyLoss, LinearRiseLoss
from .results import GuideLoss, PolicyLoss, RiseLoss, TokenStats
from .token_losses import support_factor

__all__ = [
    "GuideLoss",
    "LinearGuideLoss",
    "LinearPolicyLoss",
    "LinearRiseLoss",
    "Options",
    "PolicyLoss",
    "RiseLoss",
    "TokenStats",
    "linear_guide_loss",
    "linear_logprob",
    "linear_policy_loss",
    "linear_rise_loss",
    "support_factor",
]
