"""Values and gradients of every public function against float64, on every backend."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import rise_kernels
from tests.kernels.backends import BACKENDS, GRAD_RTOL, LOGPROB_ATOL
from tests.kernels.calls import assert_matches, leaf, random_case, with_old_logprobs
from tests.kernels.oracle import logits, relative, row_stats

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.parametrize("kind", ["guide", "policy", "rise"])
@pytest.mark.parametrize("head", ["plain", "bias", "softcap", "temperature", "all"])
def test_loss_and_gradients(backend, kind, head):
    options = {}
    if head in ("softcap", "all"):
        options["softcap"] = 1.5
    if head in ("temperature", "all"):
        options["temperature"] = 0.6
    case = random_case(kind=kind, **options)
    if head in ("bias", "all"):
        case = replace(case, bias=torch.randn(case.weight.shape[0], generator=torch.Generator().manual_seed(5)))
    assert_matches(case, backend)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dual_clip": 1.5},
        {"kl_coef": 0.3, "kl_estimator": "k1"},
        {"kl_coef": 0.3, "kl_estimator": "k2"},
        {"kl_coef": 0.3, "kl_estimator": "k3"},
        {"kl_coef": 0.3, "kl_estimator": "k3_ratio"},
        {"is_cap": 1.1},
        {"dual_clip": 1.2, "kl_coef": 0.1, "is_cap": 2.0, "clip_low": 0.1, "clip_high": 0.4, "gamma": 0.5},
    ],
    ids=lambda options: "-".join(map(str, options)) or "plain",
)
def test_policy_options(backend, options):
    case = random_case(n=40, kind="rise", **options)
    case = with_old_logprobs(case, noise=1.0, ref="kl_coef" in options, behaviour="is_cap" in options)
    assert_matches(case, backend)


@pytest.mark.parametrize("guide", ["log_support", "support", "logprob"])
@pytest.mark.parametrize("kind", ["guide", "rise"])
def test_guide_losses(backend, kind, guide):
    assert_matches(random_case(n=30, kind=kind, spread=4.0, guide=guide), backend)


def test_the_slope_of_the_shaped_objective_vanishes_for_unlikely_tokens_and_that_of_its_log_does_not(backend):
    """LUFFY maximizes p / (p + gamma), RISE its log: as p falls, d/dlogp goes to p / gamma and to 1."""
    slopes = {}
    for guide in ("log_support", "support", "logprob"):
        slopes[guide] = []
        for distance in (2.0, 8.0, 14.0, 20.0):  # how far the target's logit lies below that of one other token
            hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [-distance]]).requires_grad_()
            loss = rise_kernels.linear_guide_loss(
                hidden, weight, torch.tensor([1]), torch.ones(1), guide=guide, backend=backend
            ).loss
            loss.backward()
            p = 1 / (1 + math.exp(distance))
            slopes[guide].append((p, -weight.grad[1, 0].item() / (1 - p)))
    for p, slope in slopes["support"]:
        assert slope == pytest.approx(0.1 * p / (p + 0.1) ** 2, rel=1e-4)
    for p, slope in slopes["log_support"]:
        assert slope == pytest.approx(0.1 / (p + 0.1), rel=1e-4)
    assert [slope for _, slope in slopes["logprob"]] == pytest.approx([1.0] * 4, rel=1e-4)
    assert slopes["support"][-1][1] < 1e-7
    assert slopes["log_support"][-1][1] > 0.999


def test_behaviour_without_cap(backend):
    assert_matches(with_old_logprobs(random_case(n=20, kind="policy"), behaviour=True), backend)


def test_reference_without_kl_is_only_reported(backend):
    case = with_old_logprobs(random_case(n=20, kind="policy"), ref=True)
    expected = assert_matches(case, backend)
    out = rise_kernels.linear_policy_loss(
        case.hidden, case.weight, case.target, case.token_weight, case.advantage, ref_logprob=case.ref_logprob,
        backend=backend,
    )  # fmt: skip
    counted = (case.target >= 0) & (case.token_weight != 0)
    difference = expected.logprob - case.ref_logprob.double()
    k3 = (torch.exp(-difference) - 1 + difference).where(counted, torch.zeros_like(difference))
    torch.testing.assert_close(out.kl.double(), k3, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("head", ["plain", "all"])
@pytest.mark.parametrize("upstream", ["logprob", "entropy", "logsumexp", "three"])
def test_logprob_with_any_upstream_gradient(backend, head, upstream):
    g = torch.Generator().manual_seed(3)
    case = random_case(n=13)
    bias, options = None, {}
    if head == "all":
        bias, options = torch.randn(67, generator=g), {"softcap": 2.0, "temperature": 1.3}
    weights = torch.randn(3, 13, generator=g)
    use = {"logprob": [0], "logsumexp": [1], "entropy": [2], "three": [0, 1, 2]}[upstream]

    inputs = [case.hidden.double(), case.weight.double()] + ([] if bias is None else [bias.double()])
    inputs = [x.requires_grad_() for x in inputs]
    expected = row_stats(logits(*inputs, **options), case.target)
    grads = torch.autograd.grad(sum((weights[i].double() * expected[i]).sum() for i in use), inputs)

    found = [leaf(case.hidden), leaf(case.weight)] + ([] if bias is None else [leaf(bias)])
    out = rise_kernels.linear_logprob(
        found[0], found[1], case.target, bias=found[2] if bias is not None else None, with_entropy=True,
        backend=backend, **options,
    )  # fmt: skip
    for x, y in zip(out, expected):
        torch.testing.assert_close(x.detach().double(), y.detach(), rtol=1e-6, atol=LOGPROB_ATOL)
    sum((weights[i] * out[i]).sum() for i in use).backward()
    for x, y in zip(found, grads):
        assert relative(x.grad, y) <= GRAD_RTOL


def test_a_target_that_is_masked_out(backend):
    """Its log-prob is -inf; the entropy is that of the other entries."""
    case = random_case(n=6)
    bias = torch.zeros(67)
    bias[case.target[1]] = -math.inf
    out = rise_kernels.linear_logprob(
        case.hidden, case.weight, case.target, bias=bias, with_entropy=True, backend=backend
    )
    expected = row_stats(logits(case.hidden, case.weight, bias), case.target)
    assert out.logprob[1] == -math.inf
    for x, y in zip(out, expected):
        torch.testing.assert_close(x.double(), y, rtol=1e-6, atol=LOGPROB_ATOL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["guide", "rise"])
def test_16_bit_inputs(backend, dtype, kind):
    """float32 results from the rounded inputs; dH is rounded once to its own type, dW to the parameter's."""
    case = random_case(n=24, d=32, v=150, kind=kind, dtype=dtype)
    assert_matches(case, backend, grad_rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logprob(backend, dtype):
    case = random_case(n=24, d=32, v=150, dtype=dtype)
    h, w = leaf(case.hidden), leaf(case.weight)
    out = rise_kernels.linear_logprob(h, w, case.target, with_entropy=True, backend=backend)
    (out.logprob.sum() + out.entropy.sum()).backward()
    hh, ww = case.hidden.double().requires_grad_(), case.weight.double().requires_grad_()
    logprob, _, entropy = row_stats(logits(hh, ww), case.target)
    (logprob.sum() + entropy.sum()).backward()
    torch.testing.assert_close(out.logprob.detach().double(), logprob.detach(), rtol=1e-6, atol=LOGPROB_ATOL)
    assert h.grad.dtype == w.grad.dtype == dtype
    assert relative(h.grad, hh.grad) <= 2 * torch.finfo(dtype).eps
    assert relative(w.grad, ww.grad) <= 2 * torch.finfo(dtype).eps


def test_result_fields(backend):
    """ratio, clipped, support, token_loss by hand, in the caller's order."""
    case = random_case(n=20, kind="rise")
    case = with_old_logprobs(case, noise=0.5)
    out = rise_kernels.linear_rise_loss(
        case.hidden, case.weight, case.target, case.token_weight, case.advantage, case.is_guide, case.old_logprob,
        backend=backend,
    )  # fmt: skip
    counted = (case.target >= 0) & (case.token_weight != 0)
    guide, policy = counted & case.is_guide, counted & ~case.is_guide
    p = out.logprob.double().exp()
    ratio = torch.exp(out.logprob.double() - case.old_logprob.double())
    assert (out.ratio[~policy] == 0).all()
    assert (out.support[~guide] == 0).all()
    torch.testing.assert_close(out.ratio[policy].double(), ratio[policy], rtol=1e-5, atol=0)
    torch.testing.assert_close(out.support[guide].double(), (p / (p + 0.1))[guide], rtol=1e-5, atol=0)
    outside = torch.where(case.advantage > 0, ratio > 1.28, ratio < 0.8) & (case.advantage != 0)
    assert torch.equal(out.clipped, outside & policy)
    assert 0 < out.clipped.sum() < policy.sum()
    total = (case.token_weight.double() * out.token_loss.double()).sum()
    torch.testing.assert_close(out.loss.double(), total, rtol=1e-5, atol=1e-6)
    assert out.loss == out.policy_loss + out.guide_loss
    assert out.kl is None
    assert out.entropy is None


def test_modules_are_the_functions(backend):
    case = with_old_logprobs(random_case(n=20, kind="rise"), ref=True)
    args = (case.hidden, case.weight, case.target, case.token_weight)
    guide = rise_kernels.LinearGuideLoss(gamma=0.3, backend=backend)
    assert guide(*args).loss == rise_kernels.linear_guide_loss(*args, gamma=0.3, backend=backend).loss
    policy = rise_kernels.LinearPolicyLoss(kl_coef=0.1, backend=backend)
    same = rise_kernels.linear_policy_loss(
        *args, case.advantage.abs(), case.old_logprob, ref_logprob=case.ref_logprob, kl_coef=0.1, backend=backend
    )
    assert policy(*args, case.advantage.abs(), case.old_logprob, ref_logprob=case.ref_logprob).loss == same.loss
    rise = rise_kernels.LinearRiseLoss(clip_high=0.4, backend=backend)
    same = rise_kernels.linear_rise_loss(
        *args, case.advantage, case.is_guide, case.old_logprob, clip_high=0.4, backend=backend
    )
    assert rise(*args, case.advantage, case.is_guide, case.old_logprob).loss == same.loss
    assert "clip_high=0.4" in repr(rise)
    with pytest.raises(TypeError, match="LinearGuideLoss: unknown option clip_low"):
        rise_kernels.LinearGuideLoss(clip_low=0.1)
