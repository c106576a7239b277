"""Single pieces of the kernels: rounding, the range of float16, the softcap, and forms that only the compiler takes."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

import rise_kernels
from rise_kernels.rows import power_of_two_scale
from rise_kernels.triton_backend import elementary, logits
from rise_kernels.triton_backend.elementary import soft_capped, to_storage
from rise_kernels.triton_backend.launch import FP16_GRADS
from tests.kernels.backends import LOGPROB_ATOL
from tests.kernels.calls import assert_matches
from tests.kernels.oracle import Case
from tests.triton.on_device import DEVICE

pytestmark = pytest.mark.slow


@triton.jit
def round_kernel(x, out, GRAD_DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, to_storage(tl.load(x + at), GRAD_DTYPE, tl.float16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_torchs(dtype):
    """To nearest, ties to even; NaN stays NaN. float16 holds what is beyond its range at its largest."""
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=g).to(torch.int32)
    bits[:1024] = (bits[:1024] & ~0xFFFF) | 0x8000  # bfloat16's ties
    bits[1024:2048] = (bits[1024:2048] & ~0x1FFF) | 0x1000  # float16's
    bits[2048:2052] = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1])
    x = bits.view(torch.float32)
    out = torch.empty(4096, dtype=torch.float16, device=DEVICE)
    round_kernel[(4,)](x.to(DEVICE), out, getattr(tl, str(dtype).removeprefix("torch.")), 1024)
    expected = (x.clamp(-65504.0, 65504.0) if dtype == torch.float16 else x).to(dtype)
    torch.testing.assert_close(out.cpu().view(dtype), expected, rtol=0, atol=0, equal_nan=True)


def test_the_compiled_rounding_to_bfloat16(monkeypatch):
    """Compiled it is the cast itself; the interpreter takes that too, right where nothing is rounded."""
    if DEVICE == "cpu":
        monkeypatch.setattr(elementary, "INTERPRETED", tl.constexpr(False))
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty(1024, dtype=torch.float16, device=DEVICE)
    round_kernel[(1,)](x.float().to(DEVICE), out, tl.bfloat16, 1024)
    assert torch.equal(out.cpu().view(torch.bfloat16), x)


@triton.jit
def softcap_kernel(x, out, softcap, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, soft_capped(tl.load(x + at), softcap))


@pytest.mark.parametrize("softcap", [1.0, 15.0, 30.0, 50.0, 77.0, 100.0])
def test_a_capped_logit_holds_the_bar_of_log_probs(softcap):
    """Up to a softcap of 100, wherever the logit lies, and exactly odd."""
    z = torch.linspace(0, 5 * softcap, 1 << 14)
    z = torch.cat([z, -z]).to(DEVICE)
    out = torch.empty_like(z)
    softcap_kernel[(32,)](z, out, softcap, 1024)
    exact = softcap * torch.tanh(z.double() / softcap)
    assert (out.double() - exact).abs().max() <= LOGPROB_ATOL
    assert torch.equal(out[: 1 << 14], -out[1 << 14 :])


@pytest.mark.parametrize("softcap", [0.7, 1.0, 1.7, 2.0, 3.0])
def test_no_slope_of_a_saturated_logit_is_negative(softcap):
    """The fused loss recovers a capped logit from its rounded probability, which may lie beyond the cap."""
    weight = torch.tensor([-1.0, 1.0]).repeat(20)[:, None] * 40
    bias = torch.zeros(40, device=DEVICE, requires_grad=True)
    hidden, target = torch.ones(1, 1, device=DEVICE), torch.tensor([3], device=DEVICE)
    rise_kernels.linear_guide_loss(
        hidden.bfloat16(), weight.bfloat16().to(DEVICE), target, torch.ones(1, device=DEVICE), bias=bias,
        softcap=softcap, backend="triton",
    ).loss.backward()  # fmt: skip
    others = torch.arange(40) != 3
    assert (bias.grad.cpu()[others] >= 0).all()
    assert bias.grad[3] <= 0
    assert bias.grad.abs().max() <= 2.0**-9  # tanh is 1 in float32: all of it is rounding


@triton.jit
def exponentials_kernel(z, offset, total, slope, WIDTH: tl.constexpr):
    row, col = tl.arange(0, 2), tl.arange(0, WIDTH)
    at = row[:, None] * WIDTH + col[None, :]
    e, e_sum, e_slope = logits._exponentials(tl.load(z + at), tl.load(offset + row), True)
    tl.store(z + at, e)
    tl.store(total + row, e_sum)
    tl.store(slope + row, e_slope)


def test_the_compiled_sums_are_the_interpreted_ones(monkeypatch):
    """Compiled, both sums are one reduction; the interpreter takes that form too, if slowly."""
    if DEVICE == "cpu":
        monkeypatch.setattr(logits, "INTERPRETED", tl.constexpr(False))
    z = torch.linspace(-3, 5, 32).reshape(2, 16)
    z[1, 3] = -math.inf
    offset = torch.tensor([2.0, -1.0])
    e, total, slope = z.clone().to(DEVICE), torch.empty(2, device=DEVICE), torch.empty(2, device=DEVICE)
    exponentials_kernel[(1,)](e, offset.to(DEVICE), total, slope, 16)
    base2 = z.double() / math.log(2) - offset[:, None]
    exact = torch.exp2(base2)
    torch.testing.assert_close(e.cpu().double(), exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(total.cpu().double(), exact.sum(1), rtol=1e-5, atol=0)
    exact_slope = (exact * base2.clamp(min=-1000)).sum(1)
    torch.testing.assert_close(slope.cpu().double(), exact_slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exponentials_fit_float16_whatever_the_largest_logit(dtype):
    """Offsets are whole powers of two: the largest logit of a tile just below, at, and just above one."""
    around = torch.tensor([-2e-4, -1e-5, 0.0, 1e-5, 2e-4])
    largest = (torch.arange(5) + around) * math.log(2)
    v = 5 * 256
    weight = torch.randn(v, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    case = Case(torch.zeros(4, 8, dtype=dtype), weight, torch.arange(4), torch.ones(4))
    case.bias = largest.repeat_interleave(256)
    assert_matches(case, "triton", grad_rtol=2 * torch.finfo(dtype).eps)


def test_float16_gradients_saturate():
    """A ratio of e^9 without a bound (A < 0) is 8000 times what the call was scaled for: that row's gradient is held at
    the largest float16, nothing is infinite or NaN, and the other rows are right."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(8, 16, generator=g).half(), torch.randn(70, 16, generator=g).half()
    hidden[:, -1], weight[3, -1] = 0.0, 400.0  # changes no logit, and takes one entry of dH beyond float16
    target, advantage = torch.arange(8), -torch.ones(8)
    logprob = rise_kernels.linear_logprob(hidden.to(DEVICE), weight.to(DEVICE), target.to(DEVICE), backend="triton")
    old = logprob.logprob.cpu().clone()
    old[3] -= 9.0

    def grads(rows):
        h, w = (x.to(DEVICE, copy=True).requires_grad_() for x in (hidden[rows], weight))
        inputs = (x[rows].to(DEVICE) for x in (target, torch.ones(8), advantage, old))
        rise_kernels.linear_policy_loss(h, w, *inputs, backend="triton").loss.backward()
        return h.grad.cpu(), w.grad.cpu()

    (dh, dw), (others, _) = grads(torch.arange(8)), grads(torch.arange(8) != 3)
    assert dh.isfinite().all()
    assert dw.isfinite().all()
    torch.testing.assert_close(dh[torch.arange(8) != 3], others, rtol=4e-3, atol=4e-3 * others.abs().max().item())
    p = torch.softmax(hidden.double() @ weight.double().T, -1)[3]
    dz = math.exp(9.0) * (torch.nn.functional.one_hot(target[3], 70) - p)
    limit = 65504.0 / FP16_GRADS
    assert dz.abs().max() > 4 * limit
    expected = dz.clamp(-limit, limit) @ weight.double()
    assert expected[-1] > 65504.0 == dh[3, -1]
    expected = expected[:-1]
    torch.testing.assert_close(dh[3, :-1].double(), expected, rtol=0, atol=4e-3 * expected.abs().max().item())


def test_the_scale_is_a_power_of_two_that_brings_the_largest_into_one_to_two():
    for values, expected in (
        ([3.0, -1.0], 0.5), ([1.0], 1.0), ([1.999], 1.0), ([0.0, -5e-7], 2.0**21), ([0.0], 1.0), ([], 1.0),
        ([2.0**-149], 2.0**100), ([2.0**127], 2.0**-100), ([math.nan], 1.0), ([1.0, math.inf], 1.0),
    ):  # fmt: skip
        assert power_of_two_scale(torch.tensor(values)).item() == expected, values
