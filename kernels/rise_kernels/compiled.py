"""The public functions as custom operators, for torch.compile alone: which rows count is read from the data, so a
compiler cannot look inside, but with an operator around it there is nothing to break the graph at.

An operator's outputs have sizes that are known beforehand, so the gradient of hidden is [N, D] here, rows that do not
count included. Otherwise it is what eager mode does: `autograd.run_fused`, scaled in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from .autograd import Needs, run_fused, run_stats, stats_grads
from .backend import Options, RowStats
from .calls import VECTORS, Head, fused_call, plan_losses, plan_stats, stats_call
from .results import RiseLoss, TokenStats
from .rows import RowPlan
from .select import select_backend
from .token_losses import LossSpec, loss_parts

# They read values of the data on the host, which a CUDA graph cannot hold.
_TAGS = (torch.Tag.cudagraph_unsafe,)
_HEAD = "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, float temperature, float? softcap, int ignore_index"
_RUN = "str backend, int budget"
_SPEC = {
    "gamma": "float", "clip_low": "float", "clip_high": "float", "dual_clip": "float?", "kl_coef": "float",
    "kl_estimator": "str", "is_cap": "float?", "guide": "str",
}  # fmt: skip
assert list(_SPEC) == [field.name for field in fields(LossSpec)]
_ROWS = ", ".join(f"Tensor? {name}" for name in (*VECTORS, "is_guide"))
_SCALARS = ", ".join(f"{kind} {name}" for name, kind in _SPEC.items())


def _own(x: Tensor) -> Tensor:
    """The outputs of an operator may not share memory."""
    return x.clone()


def _options(backend: str, budget: int, hidden: Tensor) -> tuple[Any, Options]:
    chosen = select_backend(backend, hidden.device)
    assert chosen is not None, "the reference backend is plain autograd"
    return chosen, Options(budget)


# --- the losses


@torch.library.custom_op(
    "rise_kernels::token_loss",
    mutates_args=(),
    tags=_TAGS,
    schema=f"({_HEAD}, {_ROWS}, {_SCALARS}, bool with_entropy, bool[] needs, {_RUN}) -> Tensor[]",
)
def _token_loss(*args: Any) -> list[Tensor]:
    """loss, policy_loss, guide_loss, token_loss, logprob, ratio, clipped, support, [entropy], [kl], scale, and those of
    dhidden [N, D], dweight, dbias that are needed, times scale."""
    head_args, vectors, is_guide, spec, with_entropy, needs, backend, budget = _unpack(args)
    chosen, options = _options(backend, budget, head_args.hidden)
    plan, head, rows, bound = plan_losses(head_args, spec, dict(zip(VECTORS, vectors)), is_guide)
    call = fused_call(chosen, plan, head, rows, bound, spec, with_entropy, options)
    stats, losses, grads = run_fused(call, needs)
    policy, guide = loss_parts(losses, call.rows)
    per_token = [losses.loss, stats.logprob, losses.ratio, losses.clipped, losses.support, stats.entropy, losses.kl]
    out = [policy + guide, policy, guide, *(_own(plan.put(x)) for x in per_token if x is not None), call.scale]
    found = (_all_rows(plan, grads.hidden), grads.weight, grads.bias)
    for grad, x, dtype in _wanted_grads(head_args, needs, found):
        out.append(torch.zeros(x.shape, dtype=dtype, device=x.device) if grad is None else grad)
    return out


def _wanted_grads(head: Head, needs: Needs, grads: tuple) -> Iterator[tuple[Tensor | None, Tensor, torch.dtype]]:
    """(gradient, parameter, the gradient's type before it is scaled) of those that are needed."""
    parameters, dtypes = (head.hidden, head.weight, head.bias), (head.hidden.dtype, torch.float32, torch.float32)
    return ((g, x, dtype) for g, x, dtype, need in zip(grads, parameters, dtypes, needs) if need and x is not None)


def _unpack(args: tuple) -> tuple:
    head, rest = Head(*args[:7]), list(args[7:])
    vectors, is_guide = rest[: len(VECTORS)], rest[len(VECTORS)]
    spec, (with_entropy, needs, backend, budget) = LossSpec(*rest[len(VECTORS) + 1 : -4]), rest[-4:]
    return head, vectors, is_guide, spec, with_entropy, Needs(*needs), backend, budget


def _all_rows(plan: RowPlan, grad: Tensor | None) -> Tensor | None:
    """grad [n, D] at its place among all [N, D]."""
    if grad is None or (plan.order is None and plan.n == plan.total):
        return grad
    out = grad.new_zeros(plan.total, grad.shape[1])
    if plan.order is None:
        out[: plan.n] = grad
    else:
        out.index_copy_(0, plan.order, grad)
    return out


@_token_loss.register_fake
def _(*args: Any) -> list[Tensor]:
    head, vectors, _, _, with_entropy, needs, *_ = _unpack(args)
    _, advantage, _, ref, _ = vectors

    def scalar() -> Tensor:
        return head.hidden.new_empty((), dtype=torch.float32)

    def row(dtype: torch.dtype = torch.float32) -> Tensor:
        return head.hidden.new_empty(head.hidden.shape[0], dtype=dtype)

    has_kl = advantage is not None and ref is not None
    out = [scalar(), scalar(), scalar(), row(), row(), row(), row(torch.bool), row()]
    out += [row() for _ in range(with_entropy + has_kl)]
    out.append(scalar())
    return out + [x.new_empty(x.shape, dtype=dtype) for _, x, dtype in _wanted_grads(head, needs, (None,) * 3)]


def _save_grads(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    head, _, _, _, _, needs, *_ = _unpack(inputs)
    ctx.set_materialize_grads(False)
    ctx.n_inputs, ctx.needs = len(inputs), needs
    ctx.dtypes = [None if x is None else x.dtype for x in (head.hidden, head.weight, head.bias)]
    ctx.save_for_backward(*output[len(output) - 1 - sum(needs) :])


def _scale_grads(ctx: Any, upstream: list[Tensor | None]) -> tuple:
    out: list[Any] = [None] * ctx.n_inputs
    if upstream[0] is None:
        return tuple(out)
    scale, *grads = ctx.saved_tensors
    factor = upstream[0].float() / scale
    for place, need, dtype in zip((0, 1, 3), ctx.needs, ctx.dtypes):
        if need:
            out[place] = (grads.pop(0).float() * factor).to(dtype)
    return tuple(out)


_token_loss.register_autograd(_scale_grads, setup_context=_save_grads)


def token_loss(
    args: Head, spec: LossSpec, vectors: dict[str, Tensor | None], is_guide: Tensor | None,
    with_entropy: bool, backend: str, options: Options, needs: Needs,
) -> RiseLoss:  # fmt: skip
    given = [vectors.get(name) for name in VECTORS]
    given = [None if x is None else x.detach() for x in given]
    loss, *rest = _token_loss(
        *args,
        *given,
        is_guide,
        *(getattr(spec, name) for name in _SPEC),
        with_entropy,
        list(needs),
        backend,
        options.budget,
    )
    out = [x.detach() for x in rest]
    policy, guide, token, logprob, ratio, clipped, support = out[:7]
    has_kl = vectors.get("advantage") is not None and vectors.get("ref_logprob") is not None
    entropy, kl = out[7] if with_entropy else None, out[7 + with_entropy] if has_kl else None
    return RiseLoss(loss, policy, guide, token, logprob, entropy, ratio, clipped, support, kl)


# --- the log-prob


@torch.library.custom_op(
    "rise_kernels::logprob",
    mutates_args=(),
    tags=_TAGS,
    schema=f"({_HEAD}, bool with_entropy, bool[] needs, {_RUN}) -> Tensor[]",
)
def _logprob(*args: Any) -> list[Tensor]:
    """logprob, logsumexp, [entropy]."""
    head_args, (with_entropy, _, backend, budget) = Head(*args[:7]), args[7:]
    chosen, options = _options(backend, budget, head_args.hidden)
    plan, head = plan_stats(head_args)
    stats = run_stats(head, stats_call(chosen, plan, head, with_entropy, options))
    return [_own(plan.put(x)) for x in stats if x is not None]


@_logprob.register_fake
def _(*args: Any) -> list[Tensor]:
    hidden = args[0]
    return [hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(2 + args[7])]


@torch.library.custom_op(
    "rise_kernels::logprob_backward",
    mutates_args=(),
    tags=_TAGS,
    schema=f"({_HEAD}, Tensor[] stats, Tensor?[] upstream, bool[] needs, {_RUN}) -> Tensor[]",
)
def _logprob_backward(*args: Any) -> list[Tensor]:
    """Those of dhidden, dweight, dbias that are needed, in the parameters' types."""
    head_args, (all_stats, upstream, needs, backend, budget) = Head(*args[:7]), args[7:]
    chosen, options = _options(backend, budget, head_args.hidden)
    plan, head = plan_stats(head_args)
    stats = [plan.take(x) for x in all_stats]
    call = stats_call(chosen, plan, head, len(stats) == 3, options)
    upstream = [None if g is None else plan.take(g) for g in upstream]
    with torch.no_grad():
        dhidden, *others = stats_grads(
            call, head, RowStats(*stats, *[None] * (3 - len(stats))), upstream, Needs(*needs)
        )
    if dhidden is not None and dhidden.shape != head_args.hidden.shape:  # rows after the last that counts were cut off
        cut, dhidden = dhidden, torch.zeros_like(head_args.hidden, memory_format=torch.contiguous_format)
        dhidden[: plan.n] = cut
    return [g.contiguous() for g in (dhidden, *others) if g is not None]


@_logprob_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    needs = args[9]
    return [x.new_empty(x.shape) for x, need in zip((args[0], args[1], args[3]), needs) if need]


def _save_inputs(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.n_inputs, ctx.scalars, ctx.run = len(inputs), inputs[4:7], inputs[8:]
    ctx.save_for_backward(*inputs[:4], *output)


def _grads_again(ctx: Any, upstream: list[Tensor | None]) -> tuple:
    out: list[Any] = [None] * ctx.n_inputs
    if all(g is None for g in upstream):
        return tuple(out)
    hidden, weight, target, bias, *stats = ctx.saved_tensors
    needs, *run = ctx.run
    padded = [*upstream, *[None] * (3 - len(upstream))]
    grads = _logprob_backward(hidden, weight, target, bias, *ctx.scalars, stats, padded, needs, *run)
    for place, need in zip((0, 1, 3), needs):
        if need:
            out[place] = grads.pop(0)
    return tuple(out)


_logprob.register_autograd(_grads_again, setup_context=_save_inputs)


def logprob(args: Head, with_entropy: bool, backend: str, options: Options, needs: Needs) -> TokenStats:
    out = _logprob(*args, with_entropy, list(needs), backend, options.budget)
    return TokenStats(out[0], out[1], out[2] if with_entropy else None)
