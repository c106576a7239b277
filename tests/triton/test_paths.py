"""What only the Triton backend can get wrong: its two ways to memory, repeatability, offsets, launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

import rise_kernels
from rise_kernels import Options
from rise_kernels.autograd import _scaled
from rise_kernels.rows import plan_rows
from rise_kernels.triton_backend import launch, logits, rows
from rise_kernels.triton_backend.launch import Kernels
from rise_kernels.triton_backend.plan import chunk_rows
from rise_kernels.triton_backend.products import is_ready
from tests.kernels.calls import assert_matches, call, random_case
from tests.kernels.launches import triton_launches
from tests.triton.on_device import DEVICE, interpreted
from tests.triton.test_products import OnCuda

pytestmark = pytest.mark.slow


@interpreted
@pytest.mark.parametrize("descriptors", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d, v", [(17, 67), (40, 300), (64, 256)])
def test_descriptors_and_pointers(monkeypatch, descriptors, dtype, d, v):
    """sm_80 reads through pointers, sm_90 through tensor descriptors. D and V of every alignment."""
    monkeypatch.setattr(launch, "has_descriptors", lambda device: descriptors)
    tolerance = 1e-4 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert_matches(random_case(35, d, v, dtype=dtype, kind="rise"), "triton", grad_rtol=tolerance)


@interpreted
@pytest.mark.parametrize(
    "v", [1, 17, 1000, 49_152, *(pytest.param(v, marks=pytest.mark.slow) for v in (128_256, 151_936))]
)
def test_vocabularies(v):
    """Those of SmolLM2, Llama 3 and Qwen3, and small ones; the target in the last, ragged tile."""
    case = random_case(3, 20, v, kind="guide", spread=3.0)
    case.target[:2] = v - 1
    assert_matches(case, "triton")


@interpreted
@pytest.mark.parametrize("descriptors", [True, False])
def test_chunks_and_slabs(monkeypatch, descriptors):
    """Several chunks of rows and, since the weight must be copied, several slabs of the vocabulary."""
    monkeypatch.setattr(launch, "has_descriptors", lambda device: descriptors)
    case = random_case(70, 18, 1100, kind="rise", softcap=2.0)
    case = replace(case, bias=torch.randn(1100, generator=torch.Generator().manual_seed(1)))
    options = Options(budget=160 << 10)
    with triton_launches() as launches:
        assert_matches(case, "triton", options=options)
    assert len({columns for _, _, columns, _ in launches.gemms}) > 1
    assert len(launches.gemms) > 4

    stats = []
    for budget in (160 << 10, 512 << 20):
        h, w = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
        out = rise_kernels.linear_logprob(
            h, w, case.target, with_entropy=True, backend="triton", options=Options(budget=budget)
        )
        (out.logprob.sum() + 0.3 * out.entropy.sum() - 0.1 * out.logsumexp.sum()).backward()
        stats.append((out.logprob.detach(), out.entropy.detach(), h.grad, w.grad))
    for cut, whole in zip(*stats):
        torch.testing.assert_close(cut, whole, rtol=1e-5, atol=2e-6)


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bitwise_repeatable(dtype):
    """No atomics: the first call (which tunes, on a GPU) equals the tenth, bit for bit."""
    case = random_case(80, 48, 1000, dtype=dtype, kind="rise")
    case = replace(case, **{name: getattr(case, name).to(DEVICE) for name in (
        "hidden", "weight", "target", "token_weight", "advantage", "is_guide")})  # fmt: skip
    found = []
    for _ in range(10 if DEVICE == "cuda" else 3):
        out, hidden, weight, _ = call(case, "triton", with_entropy=True, options=Options(budget=300 << 10))
        out.loss.backward()
        stats = rise_kernels.linear_logprob(hidden, weight, case.target, backend="triton")
        dh, dw = torch.autograd.grad(stats.logprob.sum(), [hidden, weight])
        found.append([out.loss.detach(), out.logprob, out.entropy, hidden.grad, weight.grad, dh, dw])
    for later in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], later))


@interpreted
def test_launches_of_a_chunk():
    """One GEMM of ours a chunk for the loss, over all of V; for the log-prob one forward and one backward."""
    case = random_case(64, 32, 600, kind="guide")
    case.target = torch.arange(64)
    case.token_weight = torch.ones(64)
    with triton_launches() as launches:
        call(case, "triton")[0].loss.backward()
    assert launches.gemms == [("forward", 64, 600, 32)]
    hidden = case.hidden.requires_grad_()
    with triton_launches() as launches:
        rise_kernels.linear_logprob(hidden, case.weight, case.target, backend="triton").logprob.sum().backward()
    assert launches.gemms == [("forward", 64, 600, 32), ("backward", 64, 600, 32)]


@interpreted
def test_offsets_beyond_32_bits():
    """Rows of the workspace begin past element 2^31 (N V passes it at N = 14,135 for Qwen3). Untouched pages cost
    nothing, so the buffer can be that large."""
    n, stride, vocab = 40, (1 << 26) + 64, 50
    workspace = torch.empty((n - 1) * stride + vocab, dtype=torch.float16).as_strided((n, vocab), (stride, 1))
    assert workspace[-1].storage_offset() > 2**31
    workspace.fill_(0.5)
    vectors = torch.zeros(5, n)
    logprob, logsumexp, own, other, offset = vectors
    own.fill_(3.0), other.copy_(torch.arange(n))
    target = torch.arange(n)
    rows.dlogits_kernel[(1, triton.cdiv(n, 32))](
        workspace, stride, offset, target, logprob, logsumexp, own, other, n, vocab, 1.0, 0.0,
        HAS_SOFTCAP=False, GRAD_DTYPE=tl.float16, BLOCK_ROWS=32, BLOCK_N=64,
    )  # fmt: skip
    expected = 0.5 * torch.arange(n)[:, None].expand(n, vocab).clone()
    expected[torch.arange(n), target] = 3.0
    assert torch.equal(workspace.float(), expected)


@interpreted
@pytest.mark.parametrize("descriptors", [True, False])
def test_operands_and_workspace_whose_rows_begin_beyond_32_bits(monkeypatch, descriptors):
    """Both matrix kernels read hidden states and weight, and write logits, where a 32-bit offset would wrap."""
    n, d, v = 40, 16, 48
    stride = (1 << 26) + 64

    def far_apart(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        far = torch.empty((rows - 1) * stride + columns, dtype=dtype).as_strided((rows, columns), (stride, 1))
        assert far[-1].storage_offset() > 2**31
        return far

    hidden, weight = far_apart(n, d, torch.float16), far_apart(v, d, torch.float16)
    g = torch.Generator().manual_seed(0)
    hidden.copy_(torch.randn(n, d, generator=g)), weight.copy_(torch.randn(v, d, generator=g))
    target = torch.randint(0, v, (n,), generator=g)
    workspaces = []

    def workspace(self: Kernels, rows: int, columns: int) -> torch.Tensor:
        workspaces.append(far_apart(rows, columns, self.storage))
        return workspaces[-1]

    def gradients(h: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
        loss = rise_kernels.linear_guide_loss(h, w, target, torch.full((n,), 1 / n), backend="triton").loss
        logprob = rise_kernels.linear_logprob(h, w, target, backend="triton").logprob
        return [loss.detach(), logprob.detach(), *torch.autograd.grad(loss, [h, w]),
                *torch.autograd.grad(logprob.sum(), [h, w])]  # fmt: skip

    monkeypatch.setattr(launch, "has_descriptors", lambda device: descriptors)
    expected = gradients(hidden.contiguous(), weight.contiguous())
    monkeypatch.setattr(Kernels, "workspace", workspace)
    for found, near in zip(gradients(hidden, weight), expected, strict=True):
        assert torch.equal(found, near)
    assert len(workspaces) >= 2


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_real_shape(dtype):
    """On a GPU Qwen3-4B's head with the configurations that training uses; on the interpreter a small one."""
    n, d, v = (300, 2560, 151_936) if DEVICE == "cuda" else (33, 96, 1000)
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=g).to(DEVICE, dtype)
    weight = (torch.randn(v, d, generator=g) / d**0.5).to(DEVICE, dtype)
    target = torch.randint(0, v, (n,), generator=g).to(DEVICE)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = rise_kernels.linear_guide_loss(h, w, target, torch.full((n,), 1.0 / n, device=DEVICE), backend="triton")
    out.loss.backward()

    exact_h, exact_w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logprob = torch.log_softmax(exact_h @ exact_w.T, -1).gather(1, target[:, None])[:, 0]
    (torch.log(logprob.exp() + 0.1) - logprob).mean().backward()
    atol = 2e-5 if dtype == torch.float32 else 1e-4  # matrix instructions add up with truncation
    torch.testing.assert_close(out.logprob.double(), logprob.detach(), rtol=0, atol=atol)
    tolerance = 1e-4 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for found, exact in ((h.grad, exact_h.grad), (w.grad, exact_w.grad)):
        assert (found.double() - exact).abs().max() <= tolerance * exact.abs().max()


@interpreted
def test_tuned_once_per_architecture(monkeypatch):
    """A process may hold GPUs of two kinds: what was tuned on one is not for the other. Rows tune nothing anew."""
    keys = set()
    for kernel in (logits.forward_kernel, logits.backward_kernel):

        def run(*args, _kernel=kernel, _run=kernel.run, **keywords):
            given = dict(zip(_kernel.arg_names, args)) | keywords
            keys.add((_kernel, *(given[name] for name in _kernel.keys)))
            return _run(*args, **keywords)

        monkeypatch.setattr(kernel, "run", run)
    for arch in (9, 10):
        monkeypatch.setattr(launch, "architecture", lambda device, arch=arch: arch)
        for n in (5, 40):
            hidden, weight = torch.randn(n, 16, requires_grad=True), torch.randn(48, 16)
            target = torch.arange(n)
            rise_kernels.linear_logprob(hidden, weight, target, backend="triton").logprob.sum().backward()
    assert len(keys) == 4


def test_rows_that_overlap_are_copied():
    """A descriptor takes no stride of 0, and none shorter than a row; the interpreter would not mind."""
    x = torch.zeros(4, 16)
    assert is_ready(x, torch.float32)
    assert not is_ready(x[:1].expand(4, 16), torch.float32)
    assert not is_ready(x.as_strided((4, 16), (8, 1)), torch.float32)


def test_a_chunk_costs_the_traffic_of_dw():
    """Whole waves of dH alone would take 1664 of the 3261 rows that fit, and dW twice as often through memory."""
    assert chunk_rows(8192, 1 << 30, 329_168, depth=5120, multiprocessors=132) == 3200


@pytest.mark.parametrize("cuda", [True, False])
def test_dw_is_scaled_by_one_kernel_on_cuda(cuda):
    """Rounded as it is written. A CPU would hold all of dW in float32 in between, so there it is a slab at a time."""
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.mul_):
                products.append((str(func), len(args[0])))
            return func(*args, **(kwargs or {}))

    grad, factor = torch.randn(3, 1 << 19, generator=torch.Generator().manual_seed(0)), torch.tensor(0.3)
    given = grad.as_subclass(OnCuda) if cuda else grad
    with Products():
        out = _scaled(given, factor, grad.shape, torch.bfloat16, grad.device, rows=None)
    assert torch.equal(out.as_subclass(torch.Tensor), (grad * factor).bfloat16())
    assert products == ([("aten.mul.out", 3)] if cuda else [("aten.mul_.Tensor", 2), ("aten.mul_.Tensor", 1)])


def test_no_call_while_a_cuda_graph_is_captured(monkeypatch):
    """CUDA's own error would name neither the call nor the reason."""
    target = torch.arange(4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert plan_rows(target, 8, -100).n == 4  # on a CPU, whatever a GPU does meanwhile
    with pytest.raises(RuntimeError, match="into a CUDA graph"):
        plan_rows(target.as_subclass(OnCuda), 8, -100)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert plan_rows(target.as_subclass(OnCuda), 8, -100).n == 4
