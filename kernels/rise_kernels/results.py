"""What the public functions return. NamedTuples, so that the hooks of DDP, FSDP and DeepSpeed find the tensors inside.

Per-token tensors are float32 [N] in the caller's row order and 0 on rows that were not computed. In the three losses
everything but `loss` is detached; `token_loss` is l_t, before token_weight.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TokenStats(NamedTuple):
    """Differentiable. `entropy` (nats) is None unless with_entropy."""

    logprob: Tensor
    logsumexp: Tensor
    entropy: Tensor | None


class GuideLoss(NamedTuple):
    """`loss`: float32 scalar. `support`: rho = p / (p + gamma)."""

    loss: Tensor
    token_loss: Tensor
    logprob: Tensor
    entropy: Tensor | None
    support: Tensor


class PolicyLoss(NamedTuple):
    """`loss`: float32 scalar. `clipped` is bool [N]; `kl` is None without ref_logprob."""

    loss: Tensor
    token_loss: Tensor
    logprob: Tensor
    entropy: Tensor | None
    ratio: Tensor
    clipped: Tensor
    kl: Tensor | None


class RiseLoss(NamedTuple):
    """`loss` = `policy_loss` + `guide_loss`, float32 scalars. ratio, clipped and kl are 0 on guide rows, support is 0
    on policy rows."""

    loss: Tensor
    policy_loss: Tensor
    guide_loss: Tensor
    token_loss: Tensor
    logprob: Tensor
    entropy: Tensor | None
    ratio: Tensor
    clipped: Tensor
    support: Tensor
    kl: Tensor | None
