"""token_losses.py: values and explicit slopes against float64 autograd, and the branches taken at the bounds."""

from __future__ import annotations

import math

import pytest
import torch

from rise_kernels import support_factor
from rise_kernels.token_losses import LossSpec, TokenRows, guide_loss, kl_estimate, policy_loss, token_losses
from tests.kernels.oracle import policy_token_loss

LOGPROBS = [0.0, -1e-7, -1e-3, -0.5, -2.3, -50.0, -200.0]


@pytest.mark.parametrize("gamma", [1e-8, 0.1, 10.0])
@pytest.mark.parametrize("kind", ["log_support", "support", "logprob"])
def test_guide_loss(gamma, kind):
    exact = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    expected = torch.logaddexp(exact, torch.tensor(gamma, dtype=torch.float64).log()) - exact
    wanted = {"log_support": expected, "support": -torch.exp(-expected), "logprob": -exact}[kind]
    (slope,) = torch.autograd.grad(wanted.sum(), exact)
    value, found = guide_loss(exact.detach().float(), gamma, kind)
    rtol = 2e-5 if kind == "support" else 3e-6  # exp of a float32 difference of up to 200
    torch.testing.assert_close(value.double(), wanted.detach(), rtol=rtol, atol=1e-38)
    torch.testing.assert_close(found.double(), slope, rtol=rtol, atol=1e-38)
    support = support_factor(exact.detach().float(), gamma)
    torch.testing.assert_close(support.double(), (-expected).exp().detach(), rtol=2e-5, atol=1e-38)


def test_support_factor_is_differentiable_and_checked():
    logprob = torch.tensor([-1.0, -5.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: support_factor(x, 0.1), logprob)
    assert support_factor(torch.zeros(2, dtype=torch.bfloat16), 0.1).dtype == torch.float32
    for gamma in (0.0, -0.1, math.inf, math.nan):
        with pytest.raises(ValueError, match="gamma"):
            support_factor(logprob, gamma)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_ratio"])
def test_kl(estimator):
    exact = torch.tensor([-3.0, -1.0, -0.999, -12.0, -1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0, -1.0, -1.0, -1.0, -15.0], dtype=torch.float64)
    old = torch.tensor([-2.0, -1.5, -1.0, -11.0, -4.0], dtype=torch.float64)
    log_r = exact - ref
    k3 = torch.exp(-log_r) - 1 + log_r
    expected = {"k1": log_r, "k2": log_r**2 / 2, "k3": k3, "k3_ratio": torch.exp(exact - old) * k3}[estimator]
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    value, found = kl_estimate(exact.detach().float(), ref.float(), old.float(), estimator)
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found.double(), slope, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dual_clip", [None, 2.0])
@pytest.mark.parametrize("is_cap", [None, 1.2])
@pytest.mark.parametrize("kl_coef", [0.0, 0.4])
def test_policy_loss(dual_clip, is_cap, kl_coef):
    """Over ratios on both sides of every bound, both signs of the advantage."""
    log_ratio, advantage = torch.meshgrid(
        torch.tensor([-15.0, -1.0, -0.3, -0.1, 0.1, 0.2, 0.5, 1.0, 15.0]), torch.tensor([-2.0, -0.5, 0.5, 2.0]),
        indexing="ij",
    )  # fmt: skip
    advantage, old = advantage.flatten().double(), torch.full((36,), -1.5, dtype=torch.float64)
    exact = (old + log_ratio.flatten().double()).requires_grad_()
    ref, behaviour = old + 0.25, old - torch.linspace(-1, 1, 36, dtype=torch.float64)
    spec = LossSpec(dual_clip=dual_clip, is_cap=is_cap, kl_coef=kl_coef, kl_estimator="k3")
    expected = policy_token_loss(exact, advantage, old, ref, behaviour, 0.2, 0.28, dual_clip, kl_coef, "k3", is_cap)
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    rows = TokenRows(
        torch.ones(36), torch.zeros(36, dtype=torch.bool), advantage.float(), old.float(), ref.float(),
        behaviour.float(),
    )  # fmt: skip
    value, found, *_ = policy_loss(exact.detach().float(), rows, spec)
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.double(), slope, rtol=1e-5, atol=1e-6)


def test_a_nan_stays_on_its_row_and_shows():
    """What a row needs and is NaN makes its loss NaN, never a number."""
    rows = TokenRows(torch.ones(3), torch.tensor([True, False, False]), torch.tensor([math.nan, math.nan, 1.0]))
    out = token_losses(torch.tensor([-1.0, -1.0, -1.0]), rows, LossSpec())
    assert out.loss.isnan().tolist() == [False, True, False]
    assert out.dloss.isfinite().tolist() == [True, False, True]


def test_ratios_beyond_exp_20_are_clamped_and_have_no_slope():
    """A < 0 has no upper clip of its own: value A e^20, slope 0 (as verl); just inside the clamp both still move."""
    logprob = torch.tensor([-1.0, -1.0])
    rows = TokenRows(torch.ones(2), torch.zeros(2, dtype=torch.bool), -torch.ones(2), torch.tensor([-31.0, -20.5]))
    value, slope, ratio, clipped, _ = policy_loss(logprob, rows, LossSpec())
    torch.testing.assert_close(ratio, torch.tensor([math.exp(20.0), math.exp(19.5)]))
    torch.testing.assert_close(value, ratio)
    torch.testing.assert_close(slope, torch.tensor([0.0, math.exp(19.5)]))
    assert not clipped.any()
    zero, far = torch.tensor([0.0]), torch.tensor([40.0])
    bounds = {"k1": 20.0, "k2": 200.0, "k3": math.expm1(-20.0) + 20.0, "k3_ratio": math.expm1(-20.0) + 20.0}
    for estimator, bound in bounds.items():
        kl, kl_slope = kl_estimate(far, zero, far, estimator)
        assert kl.item() == pytest.approx(bound)
        assert kl_slope.item() == 0.0
    kl, kl_slope = kl_estimate(far, far - 1, zero, "k3_ratio")
    assert kl.item() == pytest.approx(math.exp(20.0) * math.exp(-1.0))
    assert kl_slope.item() == 0.0
