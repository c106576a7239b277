"""Faults that fused losses of this field have shipped: each condition once, on every backend."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import rise_kernels
from rise_kernels import Options
from tests.kernels.backends import BACKENDS, GRAD_RTOL, LOGPROB_ATOL
from tests.kernels.calls import PER_TOKEN, assert_matches, call, leaf, random_case, with_old_logprobs
from tests.kernels.layouts import LAYOUTS, every_second, laid_out
from tests.kernels.oracle import Case, logits, relative, row_stats, solve

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.parametrize("v", [1, 7, 127, 128, 129, 130, 383, 1000])
def test_any_vocabulary_size(backend, v):
    """V % 128 == 0 only, V % 8 != 0, a ragged last tile."""
    case = random_case(n=9, d=16, v=v, kind="guide")
    case.target[0] = v - 1
    assert_matches(case, backend, floor=1e-3)
    assert (call(case, backend)[0].logprob <= 0).all()


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 130])
def test_any_number_of_rows(backend, n):
    case = random_case(n=n, d=16, v=50, kind="rise")
    for budget in (1, 4 * 50 * 64, 512 << 20):
        assert_matches(case, backend, options=Options(budget=budget), floor=1e-3)


def test_ignored_rows_are_exactly_zero(backend):
    """Outputs of ignored rows were left uninitialised; also with another ignore_index, and hidden states of NaN."""
    case = random_case(n=30, kind="rise")
    case.target[case.target == -100] = 3
    case.target[5:11] = -7
    case.options = {"ignore_index": -7}
    case.hidden[5:11] = math.nan
    out, hidden, weight, _ = call(case, backend, with_entropy=True)
    out.loss.backward()
    for x in (out.logprob, out.entropy, out.token_loss, out.ratio, out.support, out.clipped):
        assert (x[5:11] == 0).all()
    assert (hidden.grad[5:11] == 0).all()
    assert hidden.grad[0].abs().max() > 0
    assert weight.grad.isfinite().all()
    h = leaf(case.hidden)
    stats = rise_kernels.linear_logprob(
        h, case.weight, case.target, ignore_index=-7, with_entropy=True, backend=backend
    )
    (stats.logprob.sum() + stats.entropy.sum()).backward()
    for x in (*stats, h.grad):
        assert (x[5:11] == 0).all()
    assert h.grad.isfinite().all()


@pytest.mark.parametrize("function", ["guide", "rise", "logprob"])
def test_whole_vocabulary_tiles_at_minus_infinity(backend, function):
    """Masked tokens by a bias of -inf: finite forward and backward, gradient exactly 0 there."""
    case = random_case(n=9, d=16, v=1024, kind="guide" if function == "guide" else "rise")
    masked = torch.ones(1024, dtype=torch.bool)
    masked[512:600] = False
    case.bias = torch.full((1024,), -100.0).masked_fill(masked, -math.inf)  # far from an empty tile's 0
    case.target = torch.where(case.target < 0, case.target, 512 + case.target % 88)
    kept = replace(case, weight=case.weight[~masked], bias=None)
    kept.target = torch.where(case.target < 0, case.target, case.target - 512)
    if function == "logprob":
        hidden, weight, bias = leaf(case.hidden), leaf(case.weight), leaf(case.bias)
        stats = rise_kernels.linear_logprob(hidden, weight, case.target, bias=bias, with_entropy=True, backend=backend)
        (stats.logprob.sum() + stats.entropy.sum()).backward()
        h, w = kept.hidden.double().requires_grad_(), kept.weight.double().requires_grad_()
        logprob, _, entropy = row_stats(logits(h, w), kept.target)
        (logprob.sum() + entropy.sum()).backward()
        expected = (logprob.detach(), entropy.detach(), h.grad, w.grad)
        found_logprob, found_entropy = stats.logprob.detach(), stats.entropy.detach()
    else:
        out, hidden, weight, bias = call(case, backend, with_entropy=True)
        out.loss.backward()
        answer = solve(kept)
        expected = (answer.logprob, answer.entropy, answer.hidden_grad, answer.weight_grad)
        found_logprob, found_entropy = out.logprob, out.entropy
    torch.testing.assert_close(found_logprob.double(), expected[0], rtol=0, atol=LOGPROB_ATOL)
    torch.testing.assert_close(found_entropy.double(), expected[1], rtol=0, atol=LOGPROB_ATOL)
    assert relative(hidden.grad, expected[2]) <= GRAD_RTOL
    assert relative(weight.grad[~masked], expected[3]) <= GRAD_RTOL
    assert (weight.grad[masked] == 0).all()
    assert (bias.grad[masked] == 0).all()
    assert bias.grad.isfinite().all()


def head_with_target_probability(p: float, v: int = 512, dtype=torch.float32) -> Case:
    """One row whose target has probability near p: the bias carries it, hidden is a unit vector."""
    bias = torch.zeros(v)
    bias[3] = math.log(p) - math.log1p(-p) + math.log(v - 1)
    hidden, weight = torch.ones(1, 1, dtype=dtype), torch.zeros(v, 1, dtype=dtype)
    return Case(hidden, weight, torch.tensor([3]), torch.ones(1), bias=bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.99, 0.999, 0.99999])
def test_gradient_at_a_likely_target(backend, dtype, p):
    """1 - p at the target from rounded probabilities is off by 20 to 100 %; dW = dz here, as hidden is 1."""
    case = head_with_target_probability(p, dtype=dtype)
    case.advantage = torch.ones(1)
    out, _, weight, bias = call(case, backend)
    out.loss.backward()
    exact = torch.softmax(case.bias.double(), 0)
    dz = (1.0 - exact[3]).item()
    rounded = 4e-3 if dtype == torch.bfloat16 else 1e-4
    assert -weight.grad[3].item() == pytest.approx(dz, rel=rounded)
    # Triton's dz is rounded to bfloat16 before it is summed into the bias; the others sum it in float32.
    assert -bias.grad[3].item() == pytest.approx(dz, rel=rounded if backend == "triton" else 1e-4)


@pytest.mark.parametrize("gamma", [1e-8, 0.1, 10.0])
def test_probabilities_at_both_ends(backend, gamma):
    """log-probs of 0, -1e-7, -50 and -200: finite value and gradient, equal to float64."""
    v = 64
    wanted = [0.0, -1e-7, -1e-3, -1.0, -50.0, -200.0]
    n = len(wanted)
    # Row i sees column i of the weight: target 0 against 63 equal others.
    weight = torch.zeros(v, n)
    for i, logprob in enumerate(wanted):
        others = 1e3 if logprob == 0 else -math.log(-math.expm1(logprob)) if logprob > -1 else 0.0
        gap = others + math.log(v - 1) if logprob > -1 else logprob + math.log(v - 1)
        weight[0, i] = gap
    case = Case(torch.eye(n), weight, torch.zeros(n, dtype=torch.int64), torch.ones(n), options={"gamma": gamma})
    expected = assert_matches(case, backend)
    assert expected.logprob.max() > -1e-30
    assert expected.logprob.min() < -190
    # Near 0 the log-prob has relative accuracy: log(1 + 1e-7) in float32 would be off by a fifth.
    found = call(case, backend)[0].logprob
    assert found[1].item() == pytest.approx(expected.logprob[1].item(), rel=1e-4)
    hidden, weight = leaf(case.hidden), leaf(case.weight)
    stats = rise_kernels.linear_logprob(hidden, weight, case.target, with_entropy=True, backend=backend)
    (stats.logprob.sum() + stats.entropy.sum()).backward()
    h, w = case.hidden.double().requires_grad_(), case.weight.double().requires_grad_()
    logprob, _, entropy = row_stats(logits(h, w), case.target)
    (logprob.sum() + entropy.sum()).backward()
    torch.testing.assert_close(stats.logprob.detach().double(), logprob.detach(), rtol=1e-6, atol=LOGPROB_ATOL)
    torch.testing.assert_close(stats.entropy.detach().double(), entropy.detach(), rtol=1e-6, atol=LOGPROB_ATOL)
    assert relative(hidden.grad, h.grad) <= GRAD_RTOL
    assert relative(weight.grad, w.grad) <= GRAD_RTOL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["hidden", "weight"])
def test_memory_layouts(backend, dtype, layout, which):
    """Transposed, sliced [:, :-1], every second column, a base pointer not 16-byte aligned, one row expanded."""
    case = random_case(n=20, d=24, v=130, kind="guide", dtype=dtype)
    setattr(case, which, laid_out(getattr(case, which), layout))
    # With equal rows of the weight dH is 0 up to rounding.
    floor = 0.5 if layout == "expanded" else 1e-300
    rtol = GRAD_RTOL if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert_matches(case, backend, grad_rtol=rtol, floor=floor)
    stats = rise_kernels.linear_logprob(case.hidden, case.weight, case.target, backend=backend)
    counted = case.target >= 0
    expected = row_stats(logits(case.hidden, case.weight), case.target)[0]
    torch.testing.assert_close(stats.logprob[counted].double(), expected[counted], rtol=0, atol=LOGPROB_ATOL)


def test_strided_vectors(backend):
    """Every second entry of what a caller holds: with all rows in order nothing would have copied them before."""
    case = random_case(n=20, d=16, v=50, kind="rise", kl_coef=0.2, is_cap=2.0)
    case = with_old_logprobs(case, ref=True, behaviour=True)
    case.target, case.token_weight = case.target.clamp(min=0), case.token_weight + 0.1
    case.bias = torch.linspace(-2, 2, 50)
    for name in ("bias", *PER_TOKEN):
        setattr(case, name, every_second(getattr(case, name)))
    assert_matches(case, backend)
    strided, dense = (
        rise_kernels.linear_logprob(case.hidden, case.weight, target, bias=bias, backend=backend).logprob
        for target, bias in ((case.target, case.bias), (case.target.contiguous(), case.bias.contiguous()))
    )
    assert torch.equal(strided, dense)


def test_many_small_chunks_in_bf16(backend):
    """dW must not be accumulated in bf16: 512 equal rows in chunks of a few would stop growing at 256 of them."""
    n, d, v = 512, 8, 64
    case = Case(
        torch.ones(n, d, dtype=torch.bfloat16), torch.zeros(v, d, dtype=torch.bfloat16),
        torch.zeros(n, dtype=torch.int64), torch.ones(n),
    )  # fmt: skip
    assert_matches(case, backend, grad_rtol=2 * torch.finfo(torch.bfloat16).eps, options=Options(budget=1))


def test_every_row_uses_its_own_upstream_gradient(backend):
    case = random_case(n=40, d=16, v=77)
    upstream = torch.randn(40, generator=torch.Generator().manual_seed(4))
    hidden, weight = leaf(case.hidden), leaf(case.weight)
    stats = rise_kernels.linear_logprob(hidden, weight, case.target, backend=backend)
    stats.logprob.backward(upstream)
    h, w = case.hidden.double().requires_grad_(), case.weight.double().requires_grad_()
    row_stats(logits(h, w), case.target)[0].backward(upstream.double())
    assert relative(hidden.grad, h.grad) <= GRAD_RTOL
    assert relative(weight.grad, w.grad) <= GRAD_RTOL


def test_temperature_in_forward_and_backward(backend):
    """z / T forward, 1 / T backward: log-probs of hidden / T, and a gradient that is again divided by T."""
    case = random_case(n=20, kind="policy", temperature=0.6)
    assert_matches(case, backend)
    out, hidden, _, _ = call(case, backend)
    out.loss.backward()
    same = replace(case, hidden=case.hidden / 0.6, options={})
    other, divided, _, _ = call(same, backend)
    other.loss.backward()
    torch.testing.assert_close(out.logprob, other.logprob, rtol=0, atol=LOGPROB_ATOL)
    assert relative(hidden.grad, divided.grad.double() / 0.6) <= GRAD_RTOL


def test_first_call_equals_tenth(backend):
    """Autotuning or a warm-up over something that works in place; inputs must come back unchanged."""
    case = random_case(n=30, kind="rise", softcap=2.0)
    copy = [x.clone() for x in (case.hidden, case.weight, case.target, case.token_weight, case.advantage)]
    results = []
    for _ in range(10):
        out, hidden, weight, _ = call(case, backend, with_entropy=True)
        out.loss.backward()
        results.append((out.loss.detach(), out.logprob, out.entropy, hidden.grad, weight.grad))
    for first, tenth in zip(results[0], results[-1]):
        assert torch.equal(first, tenth)
    for before, after in zip(copy, (case.hidden, case.weight, case.target, case.token_weight, case.advantage)):
        assert torch.equal(before, after)


@pytest.mark.parametrize("weight_size", [5e-7, 1e-10])
@pytest.mark.parametrize("function", ["guide", "logprob"])
def test_small_token_weights_in_fp16(backend, weight_size, function):
    """Weights are about 1 / (tokens of the step): fp16 dlogits would be flushed to 0. With the usual loss scale of
    GradScaler the fp16 gradient of hidden is representable again."""
    n = 24
    case = random_case(n=n, d=32, v=150, kind="guide", dtype=torch.float16)
    case.token_weight = torch.full((n,), weight_size)
    loss_scale = 0.1 / weight_size
    if function == "guide":
        out, hidden, weight, _ = call(case, backend)
        (out.loss * loss_scale).backward()
        answer = solve(case)
        expected = answer.hidden_grad * loss_scale, answer.weight_grad * loss_scale
    else:
        hidden, weight = leaf(case.hidden), leaf(case.weight)
        stats = rise_kernels.linear_logprob(hidden, weight, case.target, backend=backend)
        (stats.logprob * case.token_weight).sum().backward(torch.tensor(loss_scale))
        h, w = case.hidden.double().requires_grad_(), case.weight.double().requires_grad_()
        (row_stats(logits(h, w), case.target)[0] * 0.1).sum().backward()
        expected = h.grad, w.grad
    for grad, exact in zip((hidden.grad, weight.grad), expected):
        assert relative(grad, exact) <= 2e-3


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0, 300.0, 1e4])
@pytest.mark.parametrize("bias", [False, True])
def test_softcap_and_bias(backend, softcap, bias):
    """Equal to the reference, and never a positive log-prob: the loss of a likely token was negative."""
    case = random_case(n=20, d=16, v=90, kind="guide", softcap=softcap, spread=8.0)
    if bias:
        case.bias = 3 * torch.randn(90, generator=torch.Generator().manual_seed(8))
    assert_matches(case, backend)
    out, *_ = call(case, backend)
    assert (out.logprob <= 0).all()
    assert (out.token_loss >= 0).all()
