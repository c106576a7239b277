"""The public functions: fused linear log-prob and the losses of RISE-RL on top of it.

Shapes: N tokens, D hidden, V vocabulary. `hidden` [N, D], `weight` [V, D] and `bias` [V] are float32, bfloat16 or
float16; `target` is int64 [N]; per-token vectors are float [N]. Logits are z = softcap(hidden @ weight.T + bias) /
temperature with softcap(x) = softcap * tanh(x / softcap), accumulated in float32; log-probs and losses are float32.
Equations: docs/math.md.

Common keywords
    bias: Tensor [V] or None. temperature: the sampling temperature, > 0. softcap: > 0 or None.
    ignore_index: rows with this target are not computed: their outputs and gradients are exactly 0.
    with_entropy: also return the entropy (nats) of every row.
    backend: "auto" (Triton on a CUDA device where it can run, else chunked), "reference" (full logits), "chunked" or
    "triton".
    options: Options(budget=bytes of temporary workspace).

Errors: TypeError or ValueError before anything is launched, naming the argument, what was found and what was expected;
RuntimeError where the named backend cannot run, while a CUDA graph is captured, and for a double backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from . import checks, compiled, reference
from .autograd import apply_fused, apply_stats, wanted
from .backend import Options
from .calls import Head, fused_call, plan_losses, plan_stats, stats_call
from .results import GuideLoss, PolicyLoss, RiseLoss, TokenStats
from .select import BackendName, select_backend
from .token_losses import GuideKind, KlEstimator, LossSpec, loss_parts

P = ParamSpec("P")
R = TypeVar("R")


def _reference_outside_compile(function: Callable[P, R]) -> Callable[P, R]:
    """torch.compile breaks the graph at the reference backend, plain autograd around what is read from the data; the
    others are custom operators there (`compiled`). (A plain torch.compiler.disable would import the compiler here.)"""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() and kwargs.get("backend") == "reference":
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


@_reference_outside_compile
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    with_entropy: bool = False,
    backend: BackendName = "auto",
    options: Options | None = None,
) -> TokenStats:
    """log softmax(z)[target], logsumexp(z) and (with_entropy) the entropy of every row, float32 [N].

    Differentiable through all three with any upstream gradient; costs 8 N V D FLOPs with a backward pass (the logits
    are computed again) and 2 N V D without. A loss of this library costs 6. Shapes, keywords, errors: see the module.
    """
    args = Head(hidden, weight, target, bias, temperature, softcap, ignore_index)
    checks.check_head(*args, options)
    args, options = args.in_compute_dtype(), options or Options()
    if torch.compiler.is_compiling():
        return compiled.logprob(args, with_entropy, backend, options, wanted(args.hidden, weight, bias))
    chosen = select_backend(backend, hidden.device)
    plan, head = plan_stats(args)
    if chosen is None:
        stats = reference.stats(head, with_entropy=with_entropy)
    else:
        call = stats_call(chosen, plan, head, with_entropy, options)
        stats = apply_stats(head.hidden, weight, bias, call, wanted(head.hidden, weight, bias))
    return TokenStats(*(None if x is None else plan.put(x) for x in stats))


@_reference_outside_compile
def linear_guide_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weight: Tensor,
    *,
    gamma: float = 0.1,
    guide: GuideKind = "log_support",
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    with_entropy: bool = False,
    backend: BackendName = "auto",
    options: Options | None = None,
) -> GuideLoss:
    """sum_t token_weight_t * -log(p_t / (p_t + gamma)): the guide loss of RISE-RL (paper eq. 9 to 11).

    token_weight float [N]; rows of weight 0 are not computed. gamma > 0. guide: "log_support", as above; for comparison
    "support", -p_t / (p_t + gamma) (LUFFY's shaping), or "logprob", -log p_t. Gradients are formed in the forward pass:
    6 N V D FLOPs in all. Shapes, keywords, errors: see the module.
    """
    spec = LossSpec(gamma=gamma, guide=guide)
    vectors = {"token_weight": token_weight}
    head = Head(hidden, weight, target, bias, temperature, softcap, ignore_index)
    out = _token_loss(head, spec, vectors, None, with_entropy, backend, options)
    return GuideLoss(out.loss, out.token_loss, out.logprob, out.entropy, out.support)


@_reference_outside_compile
def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weight: Tensor,
    advantage: Tensor,
    old_logprob: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    ref_logprob: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    behaviour_logprob: Tensor | None = None,
    is_cap: float | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    with_entropy: bool = False,
    backend: BackendName = "auto",
    options: Options | None = None,
) -> PolicyLoss:
    """sum_t token_weight_t * l_t with the clipped policy-gradient loss of PPO / GRPO.

    With r = exp(logp - old_logprob): l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); for A < 0 and `dual_clip`
    c also l = min(l, -A c); times min(exp(old_logprob - behaviour_logprob), is_cap) where behaviour_logprob (the
    engine that sampled) is given; plus kl_coef * KL, estimated by Schulman's k1, k2 or k3 from ref_logprob, or by r k3
    ("k3_ratio").

    token_weight, advantage, old_logprob, ref_logprob, behaviour_logprob: float [N], taken as constants; may be NaN on
    ignored rows and rows of weight 0. old_logprob None: the row's own log-prob, detached (ratio 1). Rows of advantage 0
    only get statistics (unless kl_coef). 6 N V D FLOPs. Shapes, keywords, errors: see the module.
    """
    spec = LossSpec(
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        is_cap=is_cap,
    )
    vectors = {
        "token_weight": token_weight,
        "advantage": advantage,
        "old_logprob": old_logprob,
        "ref_logprob": ref_logprob,
        "behaviour_logprob": behaviour_logprob,
    }
    head = Head(hidden, weight, target, bias, temperature, softcap, ignore_index)
    out = _token_loss(head, spec, vectors, None, with_entropy, backend, options)
    return PolicyLoss(out.loss, out.token_loss, out.logprob, out.entropy, out.ratio, out.clipped, out.kl)


@_reference_outside_compile
def linear_rise_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weight: Tensor,
    advantage: Tensor,
    is_guide: Tensor,
    old_logprob: Tensor | None = None,
    *,
    gamma: float = 0.1,
    guide: GuideKind = "log_support",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    ref_logprob: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    behaviour_logprob: Tensor | None = None,
    is_cap: float | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    with_entropy: bool = False,
    backend: BackendName = "auto",
    options: Options | None = None,
) -> RiseLoss:
    """Natural and guided rows in one pass: the policy loss where `is_guide` (bool [N]) is False, the guide loss where
    it is True (paper eq. 12, lambda being part of token_weight).

    advantage, old, ref and behaviour log-probs may be NaN on guide rows. Everything else as in linear_policy_loss and
    linear_guide_loss.
    """
    checks.check_tensor("is_guide", is_guide)
    spec = LossSpec(gamma, clip_low, clip_high, dual_clip, kl_coef, kl_estimator, is_cap, guide)
    vectors = {
        "token_weight": token_weight,
        "advantage": advantage,
        "old_logprob": old_logprob,
        "ref_logprob": ref_logprob,
        "behaviour_logprob": behaviour_logprob,
    }
    head = Head(hidden, weight, target, bias, temperature, softcap, ignore_index)
    return _token_loss(head, spec, vectors, is_guide, with_entropy, backend, options)


def _token_loss(
    args: Head,
    spec: LossSpec,
    vectors: dict[str, Tensor | None],
    is_guide: Tensor | None,
    with_entropy: bool,
    backend: str,
    options: Options | None,
) -> RiseLoss:
    """The one path of the three losses. is_guide None: all rows are of one kind, guide without an advantage."""
    checks.check_head(*args, options)
    checks.check_spec(spec)
    checks.check_rows(args.hidden, spec, is_guide=is_guide, **vectors)
    args, options = args.in_compute_dtype(), options or Options()
    if torch.compiler.is_compiling():
        needs = wanted(args.hidden, args.weight, args.bias)
        return compiled.token_loss(args, spec, vectors, is_guide, with_entropy, backend, options, needs)
    chosen = select_backend(backend, args.hidden.device)
    plan, head, rows, bound = plan_losses(args, spec, vectors, is_guide)
    if chosen is None:
        loss, stats, losses = reference.fused_loss(head, rows, spec, with_entropy=with_entropy)
    else:
        call = fused_call(chosen, plan, head, rows, bound, spec, with_entropy, options)
        needs = wanted(head.hidden, args.weight, args.bias)
        loss, stats, losses = apply_fused(head.hidden, args.weight, args.bias, call, needs)
    policy_loss, guide_loss = loss_parts(losses, rows)
    return RiseLoss(
        loss=loss,
        policy_loss=policy_loss,
        guide_loss=guide_loss,
        token_loss=plan.put(losses.loss),
        logprob=plan.put(stats.logprob.detach()),
        entropy=None if stats.entropy is None else plan.put(stats.entropy.detach()),
        ratio=plan.put(losses.ratio),
        clipped=plan.put(losses.clipped),
        support=plan.put(losses.support),
        kl=None if losses.kl is None else plan.put(losses.kl),
    )
