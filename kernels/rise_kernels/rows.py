"""Which rows a call computes, in which order, and how their gradients are scaled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowPlan:
    """The one stable partition of a call's N rows, made once and used by every backend.

    The first `n_grad` of the `n` chosen rows may have a gradient, the others only have statistics; the rest of the N
    rows (ignored, or of weight 0) are not computed at all. `order` int64 [n] holds the chosen rows, or None where they
    are the first n as they stand: then nothing is copied.
    """

    total: int
    n: int
    n_grad: int
    order: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        """The chosen rows of x [N, ...]. Differentiable."""
        return self.head(x) if self.order is None else x.index_select(0, self.order)

    def head(self, x: Tensor) -> Tensor:
        """What `order` indexes: x [N, ...], or its first n rows where they are the chosen ones. Differentiable."""
        return x if self.order is not None or self.n == self.total else x[: self.n]

    def put(self, x: Tensor) -> Tensor:
        """x [n] back in the caller's order [N], 0 (or False) on the rows that were not chosen. Differentiable."""
        if self.order is None and self.n == self.total:
            return x
        out = x.new_zeros(self.total)
        if self.order is None:
            return torch.cat((x, out[self.n :]))
        return out.index_copy(0, self.order, x)


def plan_rows(
    target: Tensor, vocab: int, ignore_index: int, weighted: Tensor | None = None, may_have_grad: Tensor | None = None
) -> RowPlan:
    """Choose and order the rows, and check the targets, with one host sync for all of it.

    target int64 [N]; weighted bool [N]: rows whose token weight is not 0 (None: all); may_have_grad bool [N] (None:
    all). Raises ValueError for a target outside [0, vocab) that is not ignore_index, RuntimeError while a CUDA graph is
    captured.
    """
    total = target.shape[0]
    if total == 0:
        return RowPlan(0, 0, 0, None)
    if target.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "rise_kernels: which rows count is read on the host, so no call can be captured into a CUDA graph"
        )
    kept = target != ignore_index
    bad = kept & ((target < 0) | (target >= vocab))
    chosen = kept if weighted is None else kept & weighted
    grad = chosen if may_have_grad is None else chosen & may_have_grad
    kind = 2 - chosen.to(torch.int8) - grad.to(torch.int8)  # 0: gradient, 1: statistics only, 2: not computed
    facts = torch.stack(
        [chosen.sum(), grad.sum(), (kind[1:] < kind[:-1]).sum(), bad.sum(), bad.to(torch.int8).argmax()]
    )
    n, n_grad, unordered, n_bad, first_bad = (int(fact) for fact in facts.tolist())
    if n_bad:
        raise ValueError(
            f"target: expected values in [0, {vocab}) or ignore_index ({ignore_index}), found {int(target[first_bad])} "
            f"at row {first_bad} ({n_bad} of {total} rows are out of range)"
        )
    order = torch.argsort(kind, stable=True)[:n] if unordered else None
    return RowPlan(total, n, n_grad, order)


def power_of_two_scale(coefficient_bound: Tensor) -> Tensor:
    """The 0-d float32 power of two that brings the largest |coefficient_bound| [n] into [1, 2).

    Token weights are about 1 / (tokens of the step): without it the fp16 gradients of the logits are flushed to 0.
    """
    if coefficient_bound.numel() == 0:
        return torch.ones((), device=coefficient_bound.device)
    largest = coefficient_bound.abs().amax().nan_to_num(nan=1.0, posinf=1.0)
    exponent = torch.where(largest > 0, 1 - torch.frexp(largest).exponent, 0)
    return torch.exp2(exponent.clamp(-100, 100).float())
