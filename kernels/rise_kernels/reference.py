"""The `reference` backend: full float32 logits and plain autograd. Slow, large, and easy to check by eye."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .autograd import forbid_double_backward, plain_precision
from .backend import LinearHead, RowStats
from .token_losses import LossSpec, TokenLosses, TokenRows, loss_parts, token_losses


def logits(head: LinearHead) -> Tensor:
    """float32 [n, V]. The weight is rounded to hidden's type first, as autocast does."""
    with plain_precision(head.hidden.device):
        z = head.hidden.float() @ head.weight.to(head.hidden.dtype).float().T
        if head.bias is not None:
            z = z + head.bias.float()
        if head.softcap is not None:
            z = head.softcap * torch.tanh(z / head.softcap)
        return z / head.temperature


def stats(head: LinearHead, *, with_entropy: bool) -> RowStats:
    """Differentiable, once."""
    z = _FirstOrderOnly.apply(logits(head))
    logsumexp = torch.logsumexp(z, dim=-1)
    logprob = z.gather(1, head.target[:, None]).squeeze(1) - logsumexp
    entropy = None
    if with_entropy:
        log_p = torch.log_softmax(z, dim=-1)
        # exp(-inf) * -inf would be NaN: a masked token adds nothing.
        entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(dim=-1)
    return RowStats(logprob, logsumexp, entropy)


def fused_loss(
    head: LinearHead, rows: TokenRows, spec: LossSpec, *, with_entropy: bool
) -> tuple[Tensor, RowStats, TokenLosses]:
    """(loss, statistics, token losses). The losses enter autograd by their explicit slope dloss/dlogp."""
    row_stats = stats(head, with_entropy=with_entropy)
    losses = token_losses(row_stats.logprob.detach(), rows, spec)
    value = sum(loss_parts(losses, rows))
    return _WithSlope.apply(row_stats.logprob, value, rows.token_weight * losses.dloss), row_stats, losses


class _FirstOrderOnly(torch.autograd.Function):
    """The identity; its backward pass refuses create_graph, as the other backends do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        forbid_double_backward()
        return upstream


class _WithSlope(torch.autograd.Function):
    """`value` (a scalar), with the gradient `slope` [n] with respect to logprob [n]."""

    @staticmethod
    def forward(ctx: Any, logprob: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor):
        (slope,) = ctx.saved_tensors
        return upstream * slope, None, None
