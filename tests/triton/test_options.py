"""Everything that a call can ask for at once, compiled where there is a GPU: policy and guide rows, every option of the
loss and of the head, rows gathered from among ignored ones, operands that must be copied, several chunks and slabs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import rise_kernels
from rise_kernels import Options
from tests.kernels.backends import GRAD_RTOL, LOGPROB_ATOL
from tests.kernels.calls import PER_TOKEN, assert_matches, call, random_case, with_old_logprobs
from tests.kernels.launches import triton_launches
from tests.kernels.oracle import logits, relative, row_stats, solve
from tests.triton.on_device import DEVICE

pytestmark = [pytest.mark.slow, pytest.mark.device]

TYPES = [torch.float32, torch.bfloat16, torch.float16]
HEAD = {"softcap": 5.0, "temperature": 0.7}
BUDGET = Options(budget=384 << 10)


def tolerances(dtype):
    """(log-probs, gradients); the matrix instructions of a GPU add 16-bit products up with truncation."""
    if dtype == torch.float32:
        return LOGPROB_ATOL, GRAD_RTOL
    return (1e-4 if DEVICE == "cuda" else LOGPROB_ATOL), 2 * torch.finfo(dtype).eps


def every_option(dtype):
    """D = 70: rows that are not aligned to 16 bytes."""
    case = random_case(
        300, 70, 1003, kind="rise", spread=2.0, dtype=dtype, kl_coef=0.2, kl_estimator="k3_ratio", is_cap=1.5,
        dual_clip=2.0, **HEAD,
    )  # fmt: skip
    case = with_old_logprobs(case, ref=True, behaviour=True)
    bias = torch.linspace(-0.3, 0.3, 1003)
    tensors = {name: getattr(case, name).to(DEVICE) for name in ("hidden", "weight", *PER_TOKEN)}
    return replace(case, bias=bias.to(DEVICE), **tensors)


def assert_several_chunks_and_slabs(launches):
    """Of the kernel that leaves gradients."""
    rows, columns = zip(*((m, n) for name, m, n, _ in launches.gemms if name == launches.gemms[-1][0]))
    assert len(set(rows)) > 1
    assert len(set(columns)) > 1


@pytest.mark.parametrize("dtype", TYPES)
def test_loss(dtype):
    atol, rtol = tolerances(dtype)
    with triton_launches() as launches:
        assert_matches(every_option(dtype), "triton", atol=atol, grad_rtol=rtol, options=BUDGET)
    assert_several_chunks_and_slabs(launches)


@pytest.mark.parametrize("dtype", TYPES)
def test_logprob(dtype):
    """All three results with an upstream gradient of their own."""
    case = every_option(dtype)
    upstream = torch.randn(3, 300, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    inputs = (case.hidden, case.weight, case.bias)
    found, exact = ([x.detach().to(kind or x.dtype).requires_grad_() for x in inputs] for kind in (None, torch.double))
    expected = row_stats(logits(*exact, **HEAD), case.target)
    sum((g.double() * x).sum() for g, x in zip(upstream, expected)).backward()
    with triton_launches() as launches:
        hidden, weight, bias = found
        stats = rise_kernels.linear_logprob(
            hidden, weight, case.target, bias=bias, with_entropy=True, backend="triton", options=BUDGET, **HEAD
        )
        sum((g * x).sum() for g, x in zip(upstream, stats)).backward()
    assert_several_chunks_and_slabs(launches)
    atol, rtol = tolerances(dtype)
    for x, y in zip(stats, expected):
        torch.testing.assert_close(x.detach().double(), y.detach(), rtol=1e-6, atol=atol)
    for x, y in zip(found, exact):
        assert relative(x.grad, y.grad) <= rtol


def test_autocast():
    """float32 master weights, which bfloat16 products read a rounded slab at a time."""
    case = every_option(torch.float32)
    rounded = solve(replace(case, hidden=case.hidden.bfloat16(), weight=case.weight.bfloat16()))
    with torch.autocast(DEVICE, torch.bfloat16):
        out, hidden, weight, _ = call(case, "triton", options=BUDGET)
    out.loss.backward()
    atol, rtol = tolerances(torch.bfloat16)
    torch.testing.assert_close(out.logprob.double(), rounded.logprob, rtol=0, atol=atol)
    for grad, exact in ((hidden.grad, rounded.hidden_grad), (weight.grad, rounded.weight_grad)):
        assert grad.dtype == torch.float32
        assert relative(grad, exact) <= rtol
