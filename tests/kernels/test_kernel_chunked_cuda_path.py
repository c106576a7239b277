"""The branch of `chunked` that only CUDA takes (16-bit products into float32), with its one CUDA-only call replaced."""

from __future__ import annotations

import pytest
import torch

import rise_kernels
from rise_kernels import Options, chunked
from tests.kernels.calls import assert_matches, leaf, random_case, with_old_logprobs
from tests.kernels.oracle import Case, logits, relative, row_stats, solve


@pytest.fixture(autouse=True)
def cuda_path(monkeypatch):
    """Products as CUDA does them with out_dtype, which every one of these tests must ask for."""
    products = []

    def product(a, b, out, out_dtype, addend=None):
        assert a.dtype == b.dtype != torch.float32
        assert out.dtype == out_dtype == torch.float32
        products.append(out.shape)
        exact = a.float() @ b.float()
        return out.copy_(exact if addend is None else addend + exact)

    monkeypatch.setattr(torch, "mm", lambda a, b, *, out, out_dtype: product(a, b, out, out_dtype))
    monkeypatch.setattr(torch, "addmm", lambda x, a, b, *, out, out_dtype: product(a, b, out, out_dtype, x))
    on_cuda = chunked._multiplies_into_float32(torch.device("cuda"))
    monkeypatch.setattr(chunked, "_multiplies_into_float32", lambda device: on_cuda)
    yield
    assert products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("budget", [1, 60_000, 512 << 20])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "temperature": 0.7}])
def test_fused(dtype, budget, options):
    case = with_old_logprobs(random_case(n=60, d=16, v=150, kind="rise", dtype=dtype, **options))
    case.bias = torch.linspace(-1, 1, 150)
    # dz is rounded once to 16 bits, dH once more.
    assert_matches(case, "chunked", grad_rtol=3 * torch.finfo(dtype).eps, options=Options(budget=budget))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logprob(dtype):
    case = random_case(n=60, d=16, v=150, dtype=dtype)
    h, w = leaf(case.hidden), leaf(case.weight)
    stats = rise_kernels.linear_logprob(
        h, w, case.target, with_entropy=True, softcap=2.0, backend="chunked", options=Options(budget=60_000)
    )
    ((stats.logprob.sum() + stats.entropy.sum()) * 1e-6).backward(torch.tensor(1e6))
    hh, ww = case.hidden.double().requires_grad_(), case.weight.double().requires_grad_()
    logprob, _, entropy = row_stats(logits(hh, ww, softcap=2.0), case.target)
    (logprob.sum() + entropy.sum()).backward()
    assert relative(h.grad, hh.grad) <= 3 * torch.finfo(dtype).eps
    assert relative(w.grad, ww.grad) <= 3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("function", ["guide", "logprob"])
def test_small_weights_in_fp16(function):
    """1e-9 per token, as in a large step: dlogits of that size do not exist in fp16, dW in float32 does."""
    case = random_case(n=60, d=16, v=150, kind="guide", dtype=torch.float16)
    case.token_weight = torch.full((60,), 1e-9)
    weight = leaf(case.weight.float())
    args = (case.hidden, weight, case.target)
    with torch.autocast("cpu", torch.float16):
        if function == "guide":
            loss = rise_kernels.linear_guide_loss(*args, case.token_weight, backend="chunked").loss
        else:
            loss = (rise_kernels.linear_logprob(*args, backend="chunked").logprob * case.token_weight).sum()
    loss.backward()
    if function == "guide":
        expected = solve(case).weight_grad
    else:
        exact = case.weight.double().requires_grad_()
        (row_stats(logits(case.hidden.double(), exact), case.target)[0] * 1e-9).sum().backward()
        expected = exact.grad
    assert relative(weight.grad, expected) <= 3 * torch.finfo(torch.float16).eps


def test_autocast_with_float32_master_weight():
    case = random_case(n=60, d=16, v=150, kind="guide")
    rounded = Case(case.hidden.bfloat16(), case.weight.bfloat16(), case.target, case.token_weight)
    expected = solve(rounded)
    h, w = leaf(case.hidden), leaf(case.weight)
    with torch.autocast("cpu", torch.bfloat16):
        out = rise_kernels.linear_guide_loss(
            h, w, case.target, case.token_weight, backend="chunked", options=Options(budget=30_000)
        )
    out.loss.backward()
    torch.testing.assert_close(out.logprob.double(), expected.logprob, rtol=0, atol=2e-5)
    assert w.grad.dtype == torch.float32
    assert relative(w.grad, expected.weight_grad) <= 1.6e-2
