"""The error of 16-bit gradients, as a multiple of that of float32 logits with one rounding of dlogits.

bfloat16 gradients come from exponentials kept in float16, eight times finer than their own rounding: no visible second
rounding. float16 ones are rounded twice to the same 11 bits, sqrt(2) on average.
"""

from __future__ import annotations

import pytest
import torch

import rise_kernels
from tests.triton.on_device import DEVICE

pytestmark = pytest.mark.slow

BARS = {torch.bfloat16: 1.3, torch.float16: 1.7}
N, D, V = 96, 64, 1500


def inputs(kind, dtype):
    """Hidden states, head, targets.

    flat: all entries near 1 / V. peaked: like a trained model's, most targets near p = 1 and one entry far ahead in the
    others. skewed: one entry, never the target, e^14 to e^18 ahead of its whole tile.
    """
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=g)
    weight = torch.randn(V, D, generator=g) / D**0.5
    target = torch.randint(0, V, (N,), generator=g)
    if kind == "flat":
        weight *= 0.3
    elif kind == "skewed":
        target = 300 + target % (V - 300)
        hidden = hidden * 0.3 + weight[7] / weight[7].square().sum() * (14 + 4 * torch.rand(N, 1, generator=g))
    else:
        favourite = torch.where(torch.arange(N) % 3 > 0, target, torch.randint(0, V, (N,), generator=g))
        hidden = hidden + weight[favourite] * (12 + 6 * torch.rand(N, 1, generator=g))
    return hidden.to(dtype), weight.to(dtype), target


def exact_and_rounded(hidden, weight, target, token_weight, dtype):
    """(dH, dW) in float64, and from float32 logits whose gradient is rounded once to `dtype`."""
    answers = []
    for low in (False, True):
        h, w = hidden.double(), weight.double()
        z = (hidden.float() @ weight.float().T).double() if low else h @ w.T
        log_p = torch.log_softmax(z, -1)
        logp = log_p.gather(1, target[:, None])
        dz = -log_p.exp()
        dz.scatter_(1, target[:, None], -torch.expm1(logp))
        dz *= token_weight.double()[:, None] * (-0.1 / (logp.exp() + 0.1))
        if low:
            scale = 2.0 ** torch.floor(-torch.log2(token_weight.abs().max())).item()
            dz = (dz * scale).to(dtype).double() / scale
        dh = dz @ w
        answers.append((dh.to(dtype).double() if low else dh, dz.T @ h))
    return answers


def norm_error(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


def worst_row_error(found, exact):
    """Over the vocabulary's rows, each relative to its own size."""
    return ((found - exact).norm(dim=1) / exact.norm(dim=1)).max().item()


@pytest.mark.device
@pytest.mark.parametrize("op", ["guide loss", "log-prob"])
@pytest.mark.parametrize("kind", ["flat", "peaked", "skewed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_error(monkeypatch, dtype, kind, op):
    hidden, weight, target = inputs(kind, dtype)
    token_weight = torch.full((N,), 0.75 / N)
    (dh, dw), (low_dh, low_dw) = exact_and_rounded(hidden, weight, target, token_weight, dtype)

    h, w, t = (x.to(DEVICE) for x in (hidden, weight, target))
    h.requires_grad_(), w.requires_grad_()
    # float32 dW, which autograd would round to w's type: look at it before
    grads = spy_on_backend(monkeypatch)
    if op == "guide loss":
        rise_kernels.linear_guide_loss(h, w, t, token_weight.to(DEVICE), backend="triton").loss.backward()
    else:
        logprob = rise_kernels.linear_logprob(h, w, t, backend="triton").logprob
        slope = token_weight.to(DEVICE) * -0.1 / (logprob.detach().exp() + 0.1)
        (slope * logprob).sum().backward()
    scaled = grads[-1].weight.cpu().double()
    assert grads[-1].weight.dtype == torch.float32
    power = torch.exp2(torch.log2(dw.norm() / scaled.norm()).round())  # the call's own power of two
    found_dh, found_dw = h.grad.cpu().double(), scaled * power

    assert norm_error(found_dw, dw) <= BARS[dtype] * norm_error(low_dw, dw)
    assert worst_row_error(found_dw, dw) <= BARS[dtype] * worst_row_error(low_dw, dw)
    assert norm_error(found_dh, dh) <= BARS[dtype] * norm_error(low_dh, dh)


def spy_on_backend(monkeypatch):
    """A list of what the backend returns, before autograd rounds it to the parameters' types."""
    from rise_kernels.triton_backend import backend

    grads = []
    fused_loss, stats_backward = backend.fused_loss, backend.stats_backward

    def keep(found):
        grads.append(found)
        return found

    def spied_loss(*args, **keywords):
        out = fused_loss(*args, **keywords)
        keep(out[2])
        return out

    monkeypatch.setattr(backend, "fused_loss", spied_loss)
    monkeypatch.setattr(backend, "stats_backward", lambda *args, **keywords: keep(stats_backward(*args, **keywords)))
    return grads
