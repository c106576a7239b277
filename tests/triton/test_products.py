"""The branch of the gradient products that only CUDA takes (16-bit operands into float32), that one call replaced."""

from __future__ import annotations

import pytest
import torch

from rise_kernels.triton_backend import products

EPS = torch.finfo(torch.float32).eps


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on CUDA."""

    is_cuda = property(lambda self: True)


@pytest.fixture
def addmm_calls(monkeypatch):
    """torch.addmm as CUDA does it with out_dtype: products and sum in float32, `out` as the addend too."""
    calls = []

    def addmm(addend, a, b, *, out_dtype, beta, alpha, out):
        assert out_dtype == torch.float32 == out.dtype == addend.dtype
        assert addend.data_ptr() == out.data_ptr()
        assert a.dtype == b.dtype != torch.float32
        calls.append((tuple(a.shape), tuple(b.shape)))
        a, b, out = (x.as_subclass(torch.Tensor) for x in (a, b, out))
        exact = alpha * (a.double() @ b.double())
        # beta 0 must not read `out`: it is fresh memory
        return out.copy_(exact if beta == 0 else beta * out.double() + exact)

    monkeypatch.setattr(torch, "addmm", addmm)
    return calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products_in_chunks_and_slabs(addmm_calls, dtype):
    """dH is added up over slabs, dW over chunks; each product is one call, whatever the vocabulary."""
    g = torch.Generator().manual_seed(0)
    dz, hidden, weight = (torch.randn(*shape, generator=g).to(dtype) for shape in ((20, 300), (20, 16), (300, 16)))
    alpha = 1 / 256
    dh, dw = torch.full((20, 16), torch.nan), torch.full((300, 16), torch.nan)
    for rows in (slice(0, 12), slice(12, 20)):
        for slab in (slice(0, 128), slice(128, 300)):
            part = dz[rows, slab].as_subclass(OnCuda)
            products.add_hidden_grad(dh[rows], part, weight[slab], first=slab.start == 0, alpha=alpha)
            products.add_weight_grad(dw[slab], part, hidden[rows], first=rows.start == 0, alpha=alpha)
    assert len(addmm_calls) == 8
    for found, a, b in ((dh, dz, weight), (dw, dz.T, hidden)):
        exact = alpha * (a.double() @ b.double())
        assert (found.double() - exact).abs().max() <= 4 * EPS * exact.abs().max()


def test_float32_products_stay_float32(addmm_calls):
    with pytest.raises(TypeError, match="out_dtype"):  # the plain addmm, which the replacement does not take
        products.add_product(
            torch.zeros(2, 2), torch.ones(2, 3).as_subclass(OnCuda), torch.ones(3, 2), first=True, alpha=1.0
        )
    assert not addmm_calls


def test_torch_has_that_overload():
    """addmm(input, mat1, mat2, out_dtype, *, beta, alpha, out): PyTorch 2.11 to 2.13."""
    names = [argument.name for argument in torch.ops.aten.addmm.dtype_out._schema.arguments]
    assert names == ["self", "mat1", "mat2", "out_dtype", "beta", "alpha", "out"]
