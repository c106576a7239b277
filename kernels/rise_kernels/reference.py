"""The `reference` backend: full float32 logits and plain autograd. Slow, large, and easy to check by eye."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .autograd import forbid_double_backward, plain_precision
from .backend import LinearHead, RowStats
from .token_losses import LossSpec, TokenLosses, TokenRows, loss_parts, token_losses


def logits(head: LinearHead) -> Tensor:
    """float32 [n, V]. Under autocast the weight is rounded to hidden's type, but its gradient stays float32."""
    with plain_precision(head.hidden.device):
        weight = head.weight.float()
        if head.weight.dtype != head.hidden.dtype:
            weight = weight + (weight.to(head.hidden.dtype).float() - weight).detach()
        z = _Product.apply(head.rows(slice(None)).float(), weight)
        if head.bias is not None:
            z = z + head.bias.float()
        if head.softcap is not None:
            z = head.softcap * torch.tanh(z / head.softcap)
        return z / head.temperature


def stats(head: LinearHead, *, with_entropy: bool) -> RowStats:
    """Differentiable, once. With L the logsumexp of all other logits, logp = logsigmoid(z_target - L): its slope 1 - p
    is exact where p is near 1, while that of z_target - logsumexp(z) is a cancellation."""
    z = logits(head)
    at_target = z.gather(1, head.target[:, None])
    others = torch.logsumexp(z.scatter(1, head.target[:, None], -torch.inf), dim=-1)
    at_target = at_target.squeeze(1)
    logprob = torch.nn.functional.logsigmoid(at_target - others)
    logsumexp = torch.logaddexp(at_target, others)
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


class _Product(torch.autograd.Function):
    """hidden @ weight.T, with a backward pass in float32 even inside autocast, and only a first one."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, upstream: Tensor):
        forbid_double_backward()
        hidden, weight = ctx.saved_tensors
        with plain_precision(upstream.device):
            return (
                upstream @ weight if ctx.needs_input_grad[0] else None,
                upstream.T @ hidden if ctx.needs_input_grad[1] else None,
            )


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
