"""The public functions under torch.compile: no graph break, no other result, not a new graph for every N."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

import rise_kernels
from tests.kernels.backends import BOUNDED, LOGPROB_ATOL
from tests.kernels.calls import leaf, random_case, with_old_logprobs
from tests.kernels.oracle import row_stats

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loss_step(backend, **options):
    """A trunk, the loss, and something after it; the loss's other results are used too."""

    def step(x, trunk, weight, bias, case):
        out = rise_kernels.linear_rise_loss(
            torch.tanh(x @ trunk), weight, case.target, case.token_weight, case.advantage, case.is_guide,
            case.old_logprob, ref_logprob=case.ref_logprob, bias=bias, with_entropy=True, backend=backend, **options,
        )  # fmt: skip
        return 3.0 * out.loss, (out.loss.detach(), *out[1:])

    return step


def logprob_step(backend):
    def step(x, trunk, weight, bias, case):
        stats = rise_kernels.linear_logprob(
            torch.tanh(x @ trunk), weight, case.target, bias=bias, softcap=3.0, with_entropy=True, backend=backend
        )
        return (case.token_weight * (stats.logprob + 0.3 * stats.entropy)).sum(), stats

    return step


def assert_as_eager(step, compiled, case, *, dtype=torch.float32, autocast=False, rtol=2e-5, frozen=()):
    """Values, gradients and their types of both, on the same inputs."""
    g = torch.Generator().manual_seed(3)
    d, v = case.hidden.shape[1], case.weight.shape[0]
    inputs = {
        "trunk": torch.randn(d, d, generator=g).to(dtype),
        "weight": case.weight.to(dtype),
        "bias": torch.randn(v, generator=g).to(dtype),
    }
    found = []
    for function in (step, compiled):
        leaves = {name: leaf(x).requires_grad_(name not in frozen) for name, x in inputs.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, out = function(case.hidden.to(dtype), *leaves.values(), case)
        loss.backward()
        grads = [x.grad for x in leaves.values()]
        found.append(([loss.detach(), *(x if x is None else x.detach() for x in out)], grads))
    (values, grads), (compiled_values, compiled_grads) = found
    for eager, other in zip(values, compiled_values):
        torch.testing.assert_close(other, eager, rtol=rtol, atol=rtol)
    for eager, other in zip(grads, compiled_grads):
        assert (eager is None) == (other is None)
        if eager is not None:
            torch.testing.assert_close(other, eager, rtol=rtol, atol=rtol * eager.abs().max().item())


def policy_case(n, every_row=False):
    """Ignored rows between the others, rows of weight 0, guide rows and clipped ones."""
    case = random_case(n=n, kind="rise")
    if every_row:
        case.target.clamp_(min=0)
        case.token_weight.clamp_(min=0.1)
    case = with_old_logprobs(case, ref=True)
    case.old_logprob[case.is_guide] = float("nan")
    return case


@pytest.mark.parametrize("backend", BOUNDED)
def test_inductor(backend):
    """The compiler that users have, with gradients, with a frozen head, and under no_grad."""
    step = loss_step(backend, kl_coef=0.1, temperature=0.7)
    assert_as_eager(step, torch.compile(step, fullgraph=True), policy_case(20))
    step = logprob_step(backend)
    compiled = torch.compile(step, fullgraph=True)
    case = random_case(n=20)
    case.target[-3:] = -100
    assert_as_eager(step, compiled, case, frozen=("weight", "bias"))
    with torch.no_grad():
        stats = torch.compile(rise_kernels.linear_logprob, fullgraph=True)(
            case.hidden, case.weight, case.target, backend=backend
        )
    logprob, logsumexp, _ = row_stats(case.hidden.double() @ case.weight.double().T, case.target)
    torch.testing.assert_close(stats.logprob.double(), logprob, rtol=0, atol=LOGPROB_ATOL)
    torch.testing.assert_close(stats.logsumexp.double(), logsumexp, rtol=0, atol=LOGPROB_ATOL)


@pytest.mark.parametrize("make", [loss_step, logprob_step])
@pytest.mark.parametrize("backend", BOUNDED)
def test_any_number_of_rows_is_two_graphs(backend, make):
    """One for the first N, one for all that follow; also where no row counts, or all do."""
    step = make(backend)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for n in (13, 24, 40, 9, 30):
        case = policy_case(n)
        if n == 40:
            case.target[:] = -100
        if n == 30:
            case = policy_case(n, every_row=True)
        assert_as_eager(step, compiled, case)
    assert counter.frame_count == 2


@pytest.mark.parametrize("make", [loss_step, logprob_step])
@pytest.mark.parametrize("backend", BOUNDED)
@pytest.mark.parametrize("weights", ["float32 under autocast", "bfloat16", "float16"])
def test_16_bit(backend, make, weights):
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(weights, torch.float32)
    step = make(backend)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    # the trunk's product and tanh are fused, or not: one rounding of hidden to 16 bits more or less
    rtol = 2 * torch.finfo(torch.bfloat16 if dtype == torch.float32 else dtype).eps
    case = policy_case(20)
    assert_as_eager(step, compiled, case, dtype=dtype, autocast=dtype == torch.float32, rtol=rtol)
    case.target[:] = -100
    assert_as_eager(step, compiled, case, dtype=dtype, autocast=dtype == torch.float32, rtol=0)


@pytest.mark.parametrize("backend", BOUNDED)
def test_errors_and_small_fp16_weights(backend):
    """What is wrong with the data still raises its message; token weights of 1e-9 are not flushed to 0."""
    compiled = torch.compile(rise_kernels.linear_guide_loss, backend="aot_eager", fullgraph=True)
    case = random_case(n=20, kind="guide")
    case.target[7] = 67
    with pytest.raises(ValueError, match=r"target: expected values in \[0, 67\).*found 67 at row 7"):
        compiled(case.hidden, case.weight, case.target, case.token_weight, backend=backend)
    case = random_case(n=20, kind="guide", dtype=torch.float16)
    weight = leaf(case.weight)
    loss = compiled(case.hidden, weight, case.target, torch.full((20,), 1e-9), backend=backend).loss
    (loss * 1e7).backward()
    other = leaf(case.weight)
    args = (case.hidden, other, case.target, torch.full((20,), 1e-9))
    (rise_kernels.linear_guide_loss(*args, backend=backend).loss * 1e7).backward()
    assert other.grad.any()
    torch.testing.assert_close(weight.grad, other.grad, rtol=2e-3, atol=0)


def test_no_operator_is_captured_into_a_cuda_graph():
    """They read values of the data on the host: inductor must leave them out of its graphs."""
    for name in ("token_loss", "logprob", "logprob_backward"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.rise_kernels, name).default.tags
