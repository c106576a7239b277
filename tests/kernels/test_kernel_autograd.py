"""How the losses behave inside autograd, autocast and torch.compile."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import rise_kernels
from tests.kernels.backends import BACKENDS, GRAD_RTOL, LOGPROB_ATOL
from tests.kernels.calls import call, leaf, random_case
from tests.kernels.oracle import Case, relative, solve

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def test_no_grad_gives_the_same_values_detached(backend):
    case = random_case(kind="rise")
    with_graph, *_ = call(case, backend)
    with torch.no_grad():
        out, *_ = call(case, backend)
    assert with_graph.loss.requires_grad
    assert not out.loss.requires_grad
    torch.testing.assert_close(out.loss, with_graph.loss.detach(), rtol=1e-6, atol=1e-6)


def test_only_the_loss_is_attached(backend):
    out, *_ = call(random_case(kind="rise"), backend, with_entropy=True)
    attached = [name for name, x in out._asdict().items() if x is not None and x.requires_grad]
    assert attached == ["loss"]
    assert out.loss.dtype == torch.float32
    assert out.loss.shape == ()


def test_upstream_scale_and_retained_graph(backend):
    """Every backward pass sees the unscaled gradients, whatever the ones before it were multiplied with."""
    case = random_case(kind="rise")
    out, hidden, weight, _ = call(case, backend)
    grads = [
        torch.autograd.grad(out.loss, [hidden, weight], torch.tensor(s), retain_graph=True) for s in (1.0, -4.0, 1.0)
    ]
    for one, minus_four, again in zip(*grads):
        assert torch.equal(one, again)
        assert torch.equal(minus_four, -4 * one)


def test_gradients_handed_out_are_the_callers(backend):
    """An optimizer that changes .grad in place must not change what a retained graph gives next."""
    out, hidden, weight, _ = call(random_case(kind="guide"), backend)
    first = torch.autograd.grad(out.loss, [hidden, weight], retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.zero_()
    for g, k in zip(torch.autograd.grad(out.loss, [hidden, weight]), kept):
        assert torch.equal(g, k)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("function", ["fused", "logprob"])
def test_frozen_inputs(backend, frozen, function):
    """What is frozen gets None, the rest what it would have got anyway."""
    case = random_case(kind="guide")
    bias = torch.linspace(-1, 1, case.weight.shape[0])

    def grads(without):
        inputs = {"hidden": leaf(case.hidden), "weight": leaf(case.weight), "bias": leaf(bias)}
        for name in without:
            inputs[name].requires_grad_(False)
        h, w, b = inputs.values()
        if function == "fused":
            loss = rise_kernels.linear_guide_loss(h, w, case.target, case.token_weight, bias=b, backend=backend).loss
        else:
            loss = rise_kernels.linear_logprob(h, w, case.target, bias=b, backend=backend).logprob.sum()
        loss.backward()
        return {name: x.grad for name, x in inputs.items()}

    free, partly = grads([]), grads([frozen])
    assert partly.pop(frozen) is None
    for name, grad in partly.items():
        torch.testing.assert_close(grad, free[name])


def test_double_backward_is_refused(backend):
    case = random_case(kind="guide")
    out, hidden, _, _ = call(case, backend)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(out.loss, hidden, create_graph=True)
    hidden = leaf(case.hidden)
    stats = rise_kernels.linear_logprob(hidden, case.weight, case.target, backend=backend)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(stats.logprob.sum(), hidden, create_graph=True)


@pytest.mark.parametrize("n", [0, 5])
@pytest.mark.parametrize("kind", ["guide", "policy", "rise"])
def test_nothing_to_compute_is_an_attached_zero(backend, n, kind):
    case = random_case(n=5, kind=kind)
    case.target[:] = -100
    for name in ("target", "token_weight", "advantage", "is_guide", "hidden"):
        value = getattr(case, name)
        setattr(case, name, None if value is None else value[:n])
    case.bias = torch.zeros(case.weight.shape[0])
    out, hidden, weight, bias = call(case, backend, with_entropy=True)
    assert out.loss.item() == 0.0
    out.loss.backward()
    for x in (hidden, weight, bias):
        assert torch.equal(x.grad, torch.zeros_like(x))
    assert out.logprob.shape == out.token_loss.shape == out.entropy.shape == (n,)
    assert not out.logprob.any()

    hidden, weight = leaf(case.hidden), leaf(case.weight)
    stats = rise_kernels.linear_logprob(hidden, weight, case.target, backend=backend)
    stats.logprob.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_rows_without_possible_gradient(backend):
    """Advantage 0 with KL off: statistics as usual, loss 0, gradients exactly 0."""
    case = random_case(kind="policy")
    case.advantage[:] = 0.0
    out, hidden, weight, _ = call(case, backend)
    out.loss.backward()
    assert out.loss.item() == 0.0
    torch.testing.assert_close(out.logprob.double(), solve(case).logprob, rtol=0, atol=LOGPROB_ATOL)
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_unused_outputs_of_logprob(backend):
    """Backward through the entropy alone, and through a slice of the log-probs alone."""
    case = random_case()
    hidden = leaf(case.hidden)
    stats = rise_kernels.linear_logprob(hidden, case.weight, case.target, with_entropy=True, backend=backend)
    (by_row,) = torch.autograd.grad(stats.logprob[3], hidden, retain_graph=True)
    assert by_row[3].abs().max() > 0
    assert not by_row[torch.arange(13) != 3].any()
    (by_entropy,) = torch.autograd.grad(stats.entropy.sum(), hidden)
    assert by_entropy[0].abs().max() > 0


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_autocast(backend, weight_dtype):
    """bf16 products, as torch.nn.functional.linear under autocast; float32 master gradients, also inside backward."""
    case = random_case(n=20, d=32, v=90, kind="rise")
    rounded = Case(
        case.hidden.bfloat16(), case.weight.bfloat16(), case.target, case.token_weight, case.advantage, case.is_guide
    )
    case.weight = case.weight.to(weight_dtype)
    expected = solve(rounded)
    with torch.autocast("cpu", torch.bfloat16):
        out, hidden, weight, _ = call(case, backend)
        out.loss.backward()
    assert hidden.grad.dtype == torch.float32
    assert weight.grad.dtype == weight_dtype
    torch.testing.assert_close(out.logprob.double(), expected.logprob, rtol=0, atol=LOGPROB_ATOL)
    assert relative(hidden.grad, expected.hidden_grad) <= 8e-3
    # chunked multiplies in float32 on a CPU; triton rounds dlogits to bfloat16 everywhere, as both do on a GPU
    low = weight_dtype == torch.bfloat16 or backend == "triton"
    assert relative(weight.grad, expected.weight_grad) <= (8e-3 if low else 1e-4)


def test_torch_compile_around_it(backend):
    """A graph break is fine, another result is not."""
    case = random_case(kind="rise")

    def step(hidden, weight):
        out = rise_kernels.linear_rise_loss(
            hidden * 2.0, weight, case.target, case.token_weight, case.advantage, case.is_guide, backend=backend
        )
        return out.loss * 3.0

    found = []
    for function in (step, torch.compile(step, backend="eager")):
        hidden, weight = leaf(case.hidden), leaf(case.weight)
        loss = function(hidden, weight)
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    for eager, compiled in zip(*found):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-7)


def test_activation_checkpoint_around_it(backend):
    case = random_case(kind="guide")
    plain, hidden, weight, _ = call(case, backend)
    plain.loss.backward()
    h, w = leaf(case.hidden), leaf(case.weight)

    def step(h, w):
        return rise_kernels.linear_guide_loss(h, w, case.target, case.token_weight, backend=backend).loss

    torch.utils.checkpoint.checkpoint(step, h, w, use_reentrant=False).backward()
    assert torch.equal(h.grad, hidden.grad)
    assert torch.equal(w.grad, weight.grad)


def test_a_changed_weight_is_noticed(backend):
    """linear_logprob computes the logits again: an optimizer step in between must raise, not use the new weight."""
    case = random_case()
    hidden, weight = leaf(case.hidden), leaf(case.weight)
    stats = rise_kernels.linear_logprob(hidden, weight, case.target, backend=backend)
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stats.logprob.sum().backward()


def test_fused_loss_does_not_keep_hidden_alive(backend):
    if backend == "reference":
        pytest.skip("plain autograd keeps what it needs")
    case = random_case(kind="guide")
    source = leaf(case.hidden)
    hidden = source * 1.0
    gone = weakref.ref(hidden)
    loss = rise_kernels.linear_guide_loss(
        hidden, leaf(case.weight), case.target, case.token_weight, backend=backend
    ).loss
    del hidden
    gc.collect()
    assert gone() is None
    loss.backward()
    assert relative(source.grad, solve(case).hidden_grad) <= GRAD_RTOL


class _NoGradient(torch.autograd.Function):
    """What a later operation does that has no gradient for its input."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        return None


def test_no_upstream_gradient_at_all(backend):
    case = random_case(dtype=torch.float16)
    hidden, weight = leaf(case.hidden), leaf(case.weight)
    logprob = rise_kernels.linear_logprob(hidden, weight, case.target, backend=backend).logprob
    _NoGradient.apply(logprob).sum().backward()
    assert hidden.grad is None or not hidden.grad.any()
    assert weight.grad is None or not weight.grad.any()
