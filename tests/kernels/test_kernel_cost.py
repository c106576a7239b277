"""What a call costs: FLOPs of its products, and bytes of its temporaries.

F = N * V * D; one product is 2F. `reference` is exempt: its cost is what the others are for.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import rise_kernels
from rise_kernels import Options
from tests.kernels.backends import BOUNDED
from tests.kernels.calls import call, leaf, random_case, with_old_logprobs
from tests.kernels.launches import triton_launches
from tests.kernels.memory import LiveBytes

pytestmark = pytest.mark.parametrize("backend", BOUNDED)

N, D, V = 96, 32, 1000


def inputs(n=N, d=D, v=V):
    case = random_case(n, d, v, kind="guide")
    case.target = torch.arange(n) % v
    case.token_weight = torch.full((n,), 1.0 / n)
    return case


def gemms(run, *, n=N) -> float:
    """FLOPs of `run`, in units of F."""
    with FlopCounterMode(display=False) as counter, triton_launches() as launches:
        run()
    return (counter.get_total_flops() + launches.flops) / (n * D * V)


@pytest.mark.parametrize("budget", [64 << 10, 512 << 20])
@pytest.mark.parametrize("needs, expected", [("both", 6), ("hidden", 4), ("weight", 4), ("none", 2)])
def test_flops_of_a_fused_loss(backend, budget, needs, expected):
    case = inputs()
    hidden = case.hidden.requires_grad_(needs in ("both", "hidden"))
    weight = case.weight.requires_grad_(needs in ("both", "weight"))

    def run():
        loss = rise_kernels.linear_guide_loss(
            hidden, weight, case.target, case.token_weight, backend=backend, options=Options(budget=budget)
        ).loss
        if loss.requires_grad:
            loss.backward()

    assert gemms(run) == expected


def test_flops_under_no_grad(backend):
    """needs_input_grad is True even there: evaluation must not pay for gradients."""
    case = inputs()
    case.hidden.requires_grad_()
    case.weight.requires_grad_()
    args = (case.hidden, case.weight, case.target)
    with torch.no_grad():
        assert gemms(lambda: rise_kernels.linear_guide_loss(*args, case.token_weight, backend=backend)) == 2
        assert gemms(lambda: rise_kernels.linear_logprob(*args, backend=backend)) == 2


@pytest.mark.parametrize("needs, expected", [("both", 8), ("hidden", 6), ("weight", 6), ("none", 2)])
def test_flops_of_logprob(backend, needs, expected):
    case = inputs()
    hidden = case.hidden.requires_grad_(needs in ("both", "hidden"))
    weight = case.weight.requires_grad_(needs in ("both", "weight"))

    def run():
        stats = rise_kernels.linear_logprob(hidden, weight, case.target, with_entropy=True, backend=backend)
        if stats.logprob.requires_grad:
            (stats.logprob.sum() + stats.entropy.sum() + stats.logsumexp.sum()).backward()

    assert gemms(run) == expected


def test_rows_that_cannot_matter_cost_nothing(backend):
    """A third ignored, a third of weight 0: 2F. A third of advantage 0: statistics only for those."""
    case = inputs()
    case.target[: N // 3] = -100
    case.token_weight[N // 3 : 2 * N // 3] = 0.0
    assert gemms(lambda: call(case, backend)[0].loss.backward()) == 2

    case = inputs()
    case.advantage = torch.ones(N)
    case.advantage[::3] = 0.0
    assert gemms(lambda: call(case, backend)[0].loss.backward()) == pytest.approx(6 * 2 / 3 + 2 / 3)
    case.ref_logprob, case.options = torch.zeros(N), {"kl_coef": 0.1}
    assert gemms(lambda: call(case, backend)[0].loss.backward()) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["guide", "policy"])
@pytest.mark.parametrize("head", ["plain", "softcap", "bias", "entropy", "shuffled"])
def test_temporaries_of_a_fused_loss_stay_in_the_budget(backend, dtype, kind, head):
    """Beyond dH, the float32 dW and the result's [N] vectors. Full logits would be 2 MB."""
    n, d, v, budget = 256, 16, 2000, 300 << 10
    case = random_case(n, d, v, kind=kind, dtype=dtype)
    case.target = torch.arange(n)
    if head == "shuffled":
        case.target[::2] = -100
    keywords = {
        "softcap": {"softcap": 3.0}, "bias": {"bias": torch.randn(v)}, "entropy": {"with_entropy": True},
    }.get(head, {})  # fmt: skip
    with LiveBytes() as memory:
        out, hidden, _weight, _ = call(case, backend, options=Options(budget=budget), **keywords)
    results = n * d * hidden.element_size() + 4 * v * d
    vectors = 40 * 4 * n
    assert memory.largest <= max(budget, 4 * v * d)
    assert memory.peak <= results + budget + vectors
    with LiveBytes() as memory:
        out.loss.backward()
    grads = (n * d + v * d) * hidden.element_size()
    slab = (dtype != torch.float32) * 4 * max(n * d, v * d)
    assert memory.peak <= grads + slab + (head == "shuffled") * n * d * hidden.element_size() + vectors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temporaries_of_logprob_stay_in_the_budget(backend, dtype):
    n, d, v, budget = 256, 16, 2000, 300 << 10
    case = random_case(n, d, v, dtype=dtype)
    case.target = torch.arange(n)
    vectors = 40 * 4 * n
    hidden, weight = leaf(case.hidden), leaf(case.weight)
    keywords = {"with_entropy": True, "softcap": 3.0, "backend": backend, "options": Options(budget=budget)}
    with LiveBytes() as memory:
        stats = rise_kernels.linear_logprob(hidden, weight, case.target, **keywords)
    assert memory.peak <= budget + vectors
    with LiveBytes() as memory:
        (stats.logprob.sum() + stats.entropy.sum()).backward()
    grads = n * d * hidden.element_size() + 4 * v * d + (dtype != torch.float32) * 2 * v * d
    assert memory.peak <= budget + grads + vectors


class Products(TorchDispatchMode):
    """How many matrix products torch does."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "addmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", ["loss", "logprob"])
def test_ignored_rows_between_the_others_cost_no_budget(backend, function):
    """The chosen rows are four times the budget: they are gathered chunk by chunk.

    A chunk holds as many bytes of gathered rows as of logits here, so about twice as many chunks are right."""
    n, d, v, budget = 512, 256, 256, 64 << 10
    keywords = {"backend": backend, "options": Options(budget=budget)}

    def run(case):
        hidden, weight = leaf(case.hidden), leaf(case.weight)
        if function == "loss":
            return rise_kernels.linear_guide_loss(hidden, weight, case.target, case.token_weight, **keywords).loss
        return rise_kernels.linear_logprob(hidden, weight, case.target, **keywords).logprob.sum()

    def products(case):
        with Products() as torch_products, triton_launches() as launches:
            run(case).backward()
        return torch_products.count + len(launches.gemms)

    apart = inputs(n, d, v)
    apart.target[::2] = -100
    assert products(apart) <= 2.5 * products(inputs(n // 2, d, v))
    with LiveBytes() as memory:
        value = run(apart)
    results = (function == "loss") * (n // 2 * d * 4 + 4 * v * d)
    assert memory.peak <= results + budget + 40 * 4 * n
    value.backward()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("rows", ["all", "half of advantage 0", "half ignored"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copied_operands_stay_in_the_budget(backend, autocast, rows, dtype):
    """D = 18: rows that are not aligned to 16 bytes are copied, slab by slab and chunk by chunk."""
    n, d, v, budget = 256, 18, 1024, 128 << 10
    case = random_case(n, d, v, kind="policy", dtype=dtype)
    case.target, case.token_weight = torch.arange(n), torch.full((n,), 1.0 / n)
    case.advantage = torch.ones(n)
    if rows == "half of advantage 0":
        case.advantage[::2] = 0.0
    if rows == "half ignored":
        case.target[::2] = -100
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), LiveBytes() as memory:
        call(case, backend, options=Options(budget=budget))
    inputs_cast = (autocast and dtype == torch.float32) * 2 * n * d
    results = n * d * (2 if autocast else case.hidden.element_size()) + 4 * v * d
    assert memory.peak <= inputs_cast + results + budget + 40 * 4 * n


def test_a_frozen_head_allocates_no_weight_gradient(backend):
    case = inputs()
    hidden = leaf(case.hidden)
    with LiveBytes() as memory:
        out = rise_kernels.linear_guide_loss(
            hidden, case.weight, case.target, case.token_weight, backend=backend, options=Options(budget=32 << 10)
        )
        out.loss.backward()
    assert memory.peak < 4 * V * D


def test_many_tokens_of_a_large_vocabulary(backend):
    """V = 262,144 in 8 MB of workspace: one row of logits is 1 MB."""
    case = random_case(5, 8, 262_144, kind="guide")
    with LiveBytes() as memory:
        out, _hidden, weight, _ = call(case, backend, options=Options(budget=8 << 20))
    assert memory.peak <= 4 * 8 * 262_144 + (8 << 20) + 4096
    out.loss.backward()
    assert torch.isfinite(weight.grad).all()


class HostReads(TorchDispatchMode):
    """Names of the operations that would wait for a GPU: reading a value, or a result whose size depends on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "repeat_interleave")

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if any(name.startswith(wait) for wait in self.WAITS):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_one_host_sync_a_call(backend, monkeypatch):
    """The row plan reads its five counts at once (tolist); nothing else, forward or backward, looks at a value."""
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.shape) or tolist(self))
    case = with_old_logprobs(random_case(n=40, kind="rise"))
    with HostReads() as host:
        out, *_ = call(case, backend, with_entropy=True)
        out.loss.backward()
        forward = list(reads)
        stats = rise_kernels.linear_logprob(
            leaf(case.hidden), leaf(case.weight), case.target, with_entropy=True, backend=backend
        )
        (stats.logprob.sum() + stats.entropy.sum()).backward()
    assert len(forward) == 1
    assert len(reads) == 2
    assert host.seen == []
