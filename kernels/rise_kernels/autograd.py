"""Autograd around a backend, once for all backends.

Both functions are entered only when some gradient is wanted: needs_input_grad is True even under no_grad, so the
caller looks at torch.is_grad_enabled() (`wanted`) and evaluation costs one GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .backend import Backend, Grads, LinearHead, Needs, Options, RowStats
from .rows import power_of_two_scale
from .token_losses import LossSpec, TokenLosses, TokenRows, loss_parts, token_losses

_SCALE_SLAB = 1 << 20  # elements scaled at a time where the saved gradient or the parameter is not float32


@dataclass(frozen=True)
class FusedCall:
    """Everything a fused loss needs besides the tensors that autograd sees."""

    backend: Backend
    head: LinearHead
    rows: TokenRows
    spec: LossSpec
    scale: Tensor
    n_grad: int
    with_entropy: bool
    options: Options


@dataclass(frozen=True)
class StatsCall:
    """Everything linear_logprob needs besides the tensors that autograd sees."""

    backend: Backend
    target: Tensor
    order: Tensor | None
    temperature: float
    softcap: float | None
    with_entropy: bool
    options: Options


def wanted(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Needs:
    on = torch.is_grad_enabled()
    return Needs(
        on and hidden.requires_grad, on and weight.requires_grad, on and bias is not None and bias.requires_grad
    )


@contextmanager
def plain_precision(device: torch.device) -> Iterator[None]:
    """No autocast inside a backend: it chooses the type of each product itself."""
    with torch.autocast(device.type, enabled=False):
        yield


def forbid_double_backward() -> None:
    """Grad mode is on inside a backward pass only under create_graph=True."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "rise_kernels: double backward (create_graph=True) is not supported: gradients are formed without a graph"
        )


def run_fused(call: FusedCall, needs: Needs) -> tuple[RowStats, TokenLosses, Grads]:
    """The backend's answer; a gradient that is needed and None is 0 (there are no rows that could have one)."""
    with torch.no_grad(), plain_precision(call.head.hidden.device):
        if call.head.n == 0:
            stats = _no_rows(call.scale, call.with_entropy)
            return stats, token_losses(stats.logprob, call.rows, call.spec), Grads(None, None, None)
        n_grad = call.n_grad if any(needs) else 0
        return call.backend.fused_loss(
            call.head,
            call.rows,
            call.spec,
            scale=call.scale,
            n_grad=n_grad,
            with_entropy=call.with_entropy,
            needs=needs if n_grad else Needs(False, False, False),
            options=call.options,
        )


def run_stats(head: LinearHead, call: StatsCall) -> RowStats:
    with torch.no_grad(), plain_precision(head.hidden.device):
        if head.n == 0:
            return _no_rows(head.hidden, call.with_entropy)
        return call.backend.stats(head, with_entropy=call.with_entropy, options=call.options)


def _no_rows(like: Tensor, with_entropy: bool) -> RowStats:
    def empty() -> Tensor:
        return torch.zeros(0, device=like.device)

    return RowStats(empty(), empty(), empty() if with_entropy else None)


class FusedLoss(torch.autograd.Function):
    """The loss and its statistics: the forward pass forms the gradients, the backward pass only scales them.

    Saved for the backward pass: the gradients (times `scale`), neither hidden nor weight.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: FusedCall, needs: Needs):
        stats, losses, grads = run_fused(call, needs)
        ctx.save_for_backward(call.scale, call.head.order, *grads)
        ctx.needs = needs
        ctx.like = [None if x is None else _like(x) for x in (hidden, weight, bias)]
        return sum(loss_parts(losses, call.rows)), stats, losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any):
        forbid_double_backward()
        scale, order, *grads = ctx.saved_tensors
        factor = upstream.float() / scale
        out = [
            _scaled(grad, factor, *like, rows=rows) if need else None
            for grad, need, like, rows in zip(grads, ctx.needs, ctx.like, (order, None, None))
        ]
        return *out, None, None


def _like(x: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return x.shape, x.dtype, x.device


def _scaled(
    grad: Tensor | None, factor: Tensor | float, shape: torch.Size, dtype: torch.dtype, device: torch.device,
    *, rows: Tensor | None,
) -> Tensor:  # fmt: skip
    """grad * factor in the parameter's type, multiplied in float32; never in place, the graph may be used again.

    rows int64: where grad's rows belong in the parameter, the others being 0; None: grad has the parameter's shape.
    """
    if grad is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    if rows is None and grad.dtype == torch.float32:
        if dtype == torch.float32:
            return grad * factor
        if grad.is_cuda:  # one kernel, which rounds as it writes; a CPU would hold the float32 product in between
            return torch.mul(grad, factor, out=torch.empty(shape, dtype=dtype, device=device))
    out = (torch.empty if rows is None else torch.zeros)(shape, dtype=dtype, device=device)
    step = max(1, _SCALE_SLAB // max(1, shape[1:].numel()))
    for start in range(0, grad.shape[0], step):
        part = slice(start, start + step)
        piece = grad[part].to(torch.float32, copy=True).mul_(factor)
        if rows is None:
            out[part] = piece
        else:
            out.index_copy_(0, rows[part], piece.to(dtype))
    return out


class LogProb(torch.autograd.Function):
    """Log-prob, logsumexp and entropy with any upstream gradient: the logits are computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: StatsCall, needs: Needs):
        stats = run_stats(_head(hidden, weight, bias, call), call)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, *stats)
        ctx.call, ctx.needs = call, needs
        return tuple(stats)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None):
        forbid_double_backward()
        hidden, weight, bias, *stats = ctx.saved_tensors
        call: StatsCall = ctx.call
        if all(g is None for g in upstream):  # nothing after it has a gradient
            return None, None, None, None, None
        head = _head(hidden, weight, bias, call)
        return *stats_grads(call, head, RowStats(*stats), upstream, ctx.needs), None, None


def stats_grads(
    call: StatsCall, head: LinearHead, stats: RowStats, upstream: Sequence[Tensor | None], needs: Needs
) -> tuple[Tensor | None, ...]:
    """Gradients of hidden, weight and bias in their own shapes and types; None where not needed.

    upstream: of logprob, logsumexp and entropy, float [n] or None, not all of them None.
    """
    like = (head.hidden, head.weight, head.bias)
    if head.n == 0:
        return tuple(None if x is None or not need else torch.zeros_like(x) for x, need in zip(like, needs))
    scale = None
    if head.hidden.dtype == torch.float16:  # small upstream gradients would be flushed to 0 inside the products
        scale = power_of_two_scale(torch.cat([g.float() for g in upstream if g is not None]))
    logprob, logsumexp, entropy = (
        None if g is None else g.float() if scale is None else g.float() * scale for g in upstream
    )
    with plain_precision(head.hidden.device):
        grads = call.backend.stats_backward(
            head,
            stats,
            torch.zeros_like(stats.logprob) if logprob is None else logprob,
            logsumexp,
            entropy,
            needs=needs,
            options=call.options,
        )
    out: list[Tensor | None] = []
    for grad, x, rows in zip(grads, like, (call.order, None, None)):
        if grad is None or x is None:
            out.append(None)
        elif scale is None and rows is None:
            out.append(grad.to(x.dtype))
        else:
            out.append(_scaled(grad, 1.0 if scale is None else 1 / scale, *_like(x), rows=rows))
    return tuple(out)


def _head(hidden: Tensor, weight: Tensor, bias: Tensor | None, call: StatsCall) -> LinearHead:
    return LinearHead(hidden, weight, call.target, bias, call.temperature, call.softcap, call.order)


def apply_fused(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, call: FusedCall, needs: Needs
) -> tuple[Tensor, RowStats, TokenLosses]:
    """(loss, statistics, token losses); the loss is attached to the graph where a gradient is wanted."""
    if any(needs):
        return FusedLoss.apply(hidden, weight, bias, call, needs)
    stats, losses, _ = run_fused(call, needs)
    return sum(loss_parts(losses, call.rows)), stats, losses


def apply_stats(hidden: Tensor, weight: Tensor, bias: Tensor | None, call: StatsCall, needs: Needs) -> RowStats:
    if any(needs):
        return RowStats(*LogProb.apply(hidden, weight, bias, call, needs))
    return run_stats(_head(hidden, weight, bias, call), call)
