"""From the checked arguments of a public function to what a backend is given: the rows that matter, in their order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .autograd import FusedCall, StatsCall
from .backend import Backend, LinearHead, Options
from .rows import RowPlan, plan_rows, power_of_two_scale
from .token_losses import LossSpec, TokenRows

VECTORS = ("token_weight", "advantage", "old_logprob", "ref_logprob", "behaviour_logprob")


class Head(NamedTuple):
    """The arguments that all public functions share."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None
    ignore_index: int

    def in_compute_dtype(self) -> Head:
        """Under autocast hidden in autocast's type, as torch.nn.functional.linear would have it."""
        device = self.hidden.device.type
        if not torch.is_autocast_enabled(device):
            return self
        return Head(self.hidden.to(torch.get_autocast_dtype(device)), *self[1:])  # torch 2.11 cannot trace _replace


def plan_stats(args: Head) -> tuple[RowPlan, LinearHead]:
    """The rows that linear_logprob computes, and the head on them."""
    plan = plan_rows(args.target, args.weight.shape[0], args.ignore_index)
    return plan, _linear_head(args, plan)


def stats_call(chosen: Backend, plan: RowPlan, head: LinearHead, with_entropy: bool, options: Options) -> StatsCall:
    return StatsCall(chosen, head.target, plan.order, head.temperature, head.softcap, with_entropy, options)


def plan_losses(
    args: Head, spec: LossSpec, vectors: dict[str, Tensor | None], is_guide: Tensor | None
) -> tuple[RowPlan, LinearHead, TokenRows, Tensor]:
    """The rows that a loss computes, the head on them, their per-token inputs, and the bounds of their coefficients.

    vectors: by name, those of VECTORS that the loss has; is_guide None: all rows are of one kind, guide without an
    advantage.
    """
    rows, bound = _token_rows(vectors, is_guide, spec, args.target)
    plan = plan_rows(args.target, args.weight.shape[0], args.ignore_index, rows.token_weight != 0, bound != 0)
    return plan, _linear_head(args, plan), rows.map(plan.take), plan.take(bound)


def fused_call(
    chosen: Backend, plan: RowPlan, head: LinearHead, rows: TokenRows, bound: Tensor, spec: LossSpec,
    with_entropy: bool, options: Options,
) -> FusedCall:  # fmt: skip
    scale = power_of_two_scale(bound[: plan.n_grad])
    return FusedCall(chosen, head, rows, spec, scale, plan.n_grad, with_entropy, options)


def _linear_head(args: Head, plan: RowPlan) -> LinearHead:
    return LinearHead(
        plan.head(args.hidden),
        args.weight,
        plan.take(args.target),
        args.bias,
        args.temperature,
        args.softcap,
        plan.order,
    )


def _token_rows(
    vectors: dict[str, Tensor | None], is_guide: Tensor | None, spec: LossSpec, target: Tensor
) -> tuple[TokenRows, Tensor]:
    """The per-token inputs in float32, and what bounds each row's |token_weight * dloss/dlogp| (up to the ratio)."""
    given = {name: None if x is None else x.detach().float() for name, x in vectors.items()}
    if is_guide is None:
        is_guide = torch.full_like(target, given.get("advantage") is None, dtype=torch.bool)
    rows = TokenRows(is_guide=is_guide, **given)
    if rows.advantage is None:
        return rows, rows.token_weight
    slope = torch.where(is_guide, 1.0, rows.advantage.abs() + spec.kl_coef)
    return rows, rows.token_weight * slope
