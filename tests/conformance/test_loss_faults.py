"""Faults of the policy losses of this field, at the level of the kernels: on every backend."""

from __future__ import annotations

import math

import pytest
import torch

import rise_kernels
from rise_kernels.token_losses import LossSpec, TokenRows, policy_loss
from tests.kernels.backends import BACKENDS, GRAD_RTOL
from tests.kernels.calls import call, random_case, with_old_logprobs
from tests.kernels.oracle import Case, relative


@pytest.mark.parametrize("bound, advantage", [(0.8, -1.5), (0.8, 1.5), (1.28, 1.5), (1.28, -1.5), (3.0, -1.5)])
def test_ratio_exactly_on_a_bound(bound, advantage):
    """On a bound both branches have the same value; the unclipped one counts, so its gradient flows."""
    logprob = torch.tensor([-0.5], dtype=torch.float64)
    low, high, dual = (0.8 if bound == 0.8 else 0.2), (1.28 if bound == 1.28 else 9.0), (3.0 if bound == 3.0 else None)
    # The bounds as the ratio comes out, to the last bit: no nearby value will do.
    ratio = torch.exp(logprob - (logprob - math.log(bound))).item()
    spec = LossSpec(
        clip_low=1 - ratio if bound == 0.8 else low, clip_high=ratio - 1 if bound == 1.28 else high,
        dual_clip=ratio if dual else None,
    )  # fmt: skip
    if bound != 3.0 and ratio not in (1 - spec.clip_low, 1 + spec.clip_high):
        pytest.fail("the bound is not the ratio")
    rows = TokenRows(
        torch.ones(1), torch.tensor([False]), torch.tensor([advantage], dtype=torch.float64), logprob - math.log(bound)
    )
    value, slope, found, clipped, _ = policy_loss(logprob, rows, spec)
    assert found.item() == ratio
    assert not clipped.item()
    assert value.item() == slope.item() == -advantage * ratio


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("old", [-1e4, -200.0, 0.0, 1e4, math.inf, -math.inf])
def test_huge_log_ratios(backend, advantage, old):
    """exp overflows, 0 * inf is NaN: value and gradient stay finite, with and without KL and importance correction."""
    case = random_case(n=9, kind="policy")
    case.advantage[:] = advantage
    case.old_logprob = torch.full((9,), old)
    if math.isfinite(old):
        case.ref_logprob, case.behaviour_logprob = torch.full((9,), -old), torch.full((9,), old)
        case.options = {"kl_coef": 0.1, "is_cap": 2.0, "dual_clip": 3.0}
    out, hidden, weight, _ = call(case, backend)
    out.loss.backward()
    for x in (out.loss, out.ratio, out.token_loss, hidden.grad, weight.grad):
        assert x.isfinite().all()
    counted = (case.target >= 0) & (case.token_weight != 0)
    if advantage > 0 and old < -100:
        assert out.clipped[counted].all()
    if advantage < 0 and old > 100:
        assert out.clipped[counted].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_ratio_of_a_negative_advantage(backend, dtype):
    """Nothing clips it without a dual clip: coefficients of e^12 times the token weight, beyond float16's range once
    scaled. Gradients stay finite and keep their sign."""
    case = random_case(n=9, kind="policy", dtype=dtype)
    case.advantage[:] = -1.0
    case.token_weight[case.token_weight != 0] = 1e-3
    case.old_logprob = call(case, backend)[0].logprob - 12.0
    out, hidden, weight, _ = call(case, backend)
    out.loss.backward()
    assert (out.ratio[[0, 1]] > 1e5).all()
    for x in (out.loss, hidden.grad, weight.grad):
        assert x.isfinite().all()
    # the loss falls with the target's log-prob: its gradient at the target's own row points along hidden
    assert (weight.grad[case.target[0]].float() @ case.hidden[0].float()) > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_micro_batches_of_unequal_length(backend):
    """Nothing in the loss divides: token weights of the whole step make 1 + 7 + 32 rows equal to 40."""
    case = with_old_logprobs(random_case(n=40, kind="rise"))
    whole, hidden, weight, _ = call(case, backend)
    whole.loss.backward()
    loss, dw = 0.0, torch.zeros_like(weight)
    for part in (slice(0, 1), slice(1, 8), slice(8, 40)):
        piece = Case(
            case.hidden[part], case.weight, case.target[part], case.token_weight[part], case.advantage[part],
            case.is_guide[part], case.old_logprob[part],
        )  # fmt: skip
        out, h, w, _ = call(piece, backend)
        out.loss.backward()
        assert relative(h.grad, hidden.grad[part].double(), 1e-3) <= GRAD_RTOL
        loss, dw = loss + out.loss.item(), dw + w.grad
    assert loss == pytest.approx(whole.loss.item(), rel=1e-5)
    assert relative(dw, weight.grad.double()) <= GRAD_RTOL


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fill", ["ignored", "weight 0", "NaN behind ignored"])
def test_padding_added(backend, fill):
    """Padding rows change neither loss nor gradients, bit for bit."""
    case = with_old_logprobs(random_case(n=24, kind="rise"))
    plain, hidden, weight, _ = call(case, backend)
    plain.loss.backward()
    junk = math.nan if fill == "NaN behind ignored" else 1.0

    def padded(x, value):
        return torch.cat([x, torch.full((8, *x.shape[1:]), value, dtype=x.dtype)])

    more = Case(
        padded(case.hidden, junk), case.weight, padded(case.target, 5 if fill == "weight 0" else -100),
        padded(case.token_weight, 0.0 if fill == "weight 0" else junk), padded(case.advantage, junk),
        padded(case.is_guide, False), padded(case.old_logprob, junk),
    )  # fmt: skip
    out, h, w, _ = call(more, backend)
    out.loss.backward()
    assert torch.equal(out.loss, plain.loss)
    assert torch.equal(w.grad, weight.grad)
    assert torch.equal(h.grad[:24], hidden.grad)
    assert (h.grad[24:] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_importance_correction_is_capped_and_spares_the_kl(backend):
    """min(exp(old - behaviour), cap) multiplies the surrogate, not the KL penalty."""
    case = random_case(n=12, kind="policy", kl_coef=0.5, is_cap=2.0)
    case.advantage[:] = 0.0
    case.old_logprob, case.ref_logprob = torch.zeros(12) - 3, torch.zeros(12) - 2
    results = []
    for behaviour in (-3.0, -9.0):
        case.behaviour_logprob = torch.full((12,), behaviour)
        results.append(call(case, backend)[0])
    assert results[0].loss == results[1].loss > 0
    case.advantage[:] = 1.0
    case.options["kl_coef"] = 0.0
    losses = []
    for behaviour in (-3.0, -9.0, -50.0):
        case.behaviour_logprob = torch.full((12,), behaviour)
        losses.append(call(case, backend)[0].loss.item())
    assert losses[1] == losses[2] == pytest.approx(2 * losses[0], rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_old_logprob_of_none_is_a_ratio_of_one(backend):
    case = random_case(n=24, kind="policy")
    first, hidden, _, _ = call(case, backend)
    first.loss.backward()
    case.old_logprob = first.logprob
    second, h, _, _ = call(case, backend)
    second.loss.backward()
    counted = (case.target >= 0) & (case.token_weight != 0)
    assert (first.ratio[counted] == 1).all()
    torch.testing.assert_close(second.loss, first.loss, rtol=1e-6, atol=1e-6)
    assert relative(h.grad, hidden.grad.double()) <= GRAD_RTOL
    assert not rise_kernels.linear_policy_loss(
        case.hidden, case.weight, case.target, case.token_weight, case.advantage, backend=backend
    ).clipped.any()
