"""Run a Case through rise_kernels and hold the result against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import rise_kernels
from tests.kernels.backends import GRAD_RTOL, LOGPROB_ATOL
from tests.kernels.oracle import Answer, Case, relative, solve

PER_TOKEN = ("target", "token_weight", "advantage", "is_guide", "old_logprob", "ref_logprob", "behaviour_logprob")


def leaf(x: Tensor) -> Tensor:
    """A leaf that wants a gradient, with x's own strides and address."""
    return x.detach().requires_grad_()


def random_case(n=13, d=24, v=67, *, seed=0, kind="rise", dtype=torch.float32, spread=1.0, **options) -> Case:
    """kind: guide, policy or rise. Two ignored rows, one of weight 0, one of advantage 0 (n >= 8)."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    hidden, weight = normal(n, d).to(dtype), (normal(v, d) * spread / d**0.5).to(dtype)
    target = torch.randint(0, v, (n,), generator=g)
    token_weight = torch.rand(n, generator=g) + 0.1
    if n >= 8:
        target[2] = target[n - 2] = -100
        token_weight[4] = 0.0
    if kind == "guide":
        return Case(hidden, weight, target, token_weight, options=options)
    advantage = normal(n)
    advantage[n // 2] = 0.0
    is_guide = torch.rand(n, generator=g) < 0.4 if kind == "rise" else None
    return Case(hidden, weight, target, token_weight, advantage, is_guide, options=options)


def with_old_logprobs(case: Case, *, seed=1, noise=0.3, ref=False, behaviour=False) -> Case:
    """Old, reference and behaviour log-probs near the case's own, so that some rows are clipped and others are not."""
    g = torch.Generator().manual_seed(seed)
    own = solve(replace(case, options={k: case.options[k] for k in ("temperature", "softcap") if k in case.options}))

    def near():
        return (own.logprob + noise * torch.randn(own.logprob.shape, generator=g)).float()

    return replace(
        case, old_logprob=near(), ref_logprob=near() if ref else None, behaviour_logprob=near() if behaviour else None
    )


def call(case: Case, backend: str, **more):
    """The loss function that fits the case, on fresh leaves: (result, hidden, weight, bias)."""
    hidden, weight = leaf(case.hidden), leaf(case.weight)
    bias = None if case.bias is None else leaf(case.bias)
    keywords = dict(bias=bias, backend=backend, **case.options) | more
    if case.advantage is None:
        out = rise_kernels.linear_guide_loss(hidden, weight, case.target, case.token_weight, **keywords)
    elif case.is_guide is None:
        out = rise_kernels.linear_policy_loss(
            hidden, weight, case.target, case.token_weight, case.advantage, case.old_logprob,
            **case.vectors(), **keywords,
        )  # fmt: skip
    else:
        out = rise_kernels.linear_rise_loss(
            hidden, weight, case.target, case.token_weight, case.advantage, case.is_guide, case.old_logprob,
            **case.vectors(), **keywords,
        )  # fmt: skip
    return out, hidden, weight, bias


def assert_matches(case: Case, backend: str, *, grad_rtol=GRAD_RTOL, atol=LOGPROB_ATOL, floor=1e-300, **more) -> Answer:
    expected = solve(case)
    out, hidden, weight, bias = call(case, backend, with_entropy=True, **more)
    out.loss.backward()
    torch.testing.assert_close(out.logprob.double(), expected.logprob, rtol=1e-6, atol=atol)
    torch.testing.assert_close(out.entropy.double(), expected.entropy, rtol=1e-6, atol=atol)
    scale = case.token_weight[case.token_weight == case.token_weight].abs().sum().double().item()
    assert abs(out.loss.item() - expected.loss.item()) <= 1e-5 * max(abs(expected.loss.item()), scale)
    assert relative(hidden.grad, expected.hidden_grad, floor) <= grad_rtol
    assert relative(weight.grad, expected.weight_grad, floor) <= grad_rtol
    if bias is not None:
        assert relative(bias.grad, expected.bias_grad, floor) <= grad_rtol
    return expected
