"""Properties that hold for every input: fused equals float64 over all options; micro-batches add up; order is free."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rise_kernels import Options
from tests.kernels.backends import BACKENDS, GRAD_RTOL
from tests.kernels.calls import PER_TOKEN, assert_matches, call, random_case, with_old_logprobs
from tests.kernels.oracle import Case, relative


def rows(case: Case, index: torch.Tensor) -> Case:
    """The same case with only (or reordered to) these rows."""
    chosen = {name: getattr(case, name)[index] for name in PER_TOKEN if getattr(case, name) is not None}
    return replace(case, hidden=case.hidden[index], **chosen)


@st.composite
def cases(draw) -> Case:
    n = draw(st.integers(1, 40))
    # Around the interpreter's tile, 256 entries by 32 of the depth: within one, at its end, and over several.
    d = draw(st.integers(1, 17) | st.sampled_from([31, 32, 33, 65]))
    v = draw(st.integers(2, 90) | st.sampled_from([255, 256, 257, 600]))
    kind = draw(st.sampled_from(["guide", "policy", "rise"]))
    options = {
        "temperature": draw(st.sampled_from([1.0, 0.6, 1.7])),
        "softcap": draw(st.sampled_from([None, 1.0, 30.0, 1000.0])),
    }
    if kind != "policy":
        options["gamma"] = draw(st.sampled_from([1e-8, 0.1, 10.0]))
    old = False
    if kind != "guide":
        options |= {
            "clip_low": draw(st.sampled_from([0.0, 0.2, 1.0])),
            "clip_high": draw(st.sampled_from([0.0, 0.28])),
            "dual_clip": draw(st.sampled_from([None, 1.5, 3.0])),
            "kl_coef": draw(st.sampled_from([0.0, 0.2])),
            "kl_estimator": draw(st.sampled_from(["k1", "k2", "k3", "k3_ratio"])),
            "is_cap": draw(st.sampled_from([None, 0.9, 2.0])),
        }
        # A clip width of 0 with the row's own log-prob is a tie at ratio 1, where float64 autograd halves the slope.
        old = options["clip_low"] == 0 or options["clip_high"] == 0 or draw(st.booleans())
    seed = draw(st.integers(0, 1000))
    case = random_case(n, d, v, seed=seed, kind=kind, spread=draw(st.sampled_from([1.0, 4.0])), **options)
    if draw(st.booleans()):
        case = replace(case, bias=torch.randn(v, generator=torch.Generator().manual_seed(seed)))
    if kind != "guide":
        near = with_old_logprobs(case, seed=seed, noise=0.4, ref=True, behaviour=True)
        case = replace(
            case,
            old_logprob=near.old_logprob if old else None,
            ref_logprob=near.ref_logprob if options["kl_coef"] or draw(st.booleans()) else None,
            behaviour_logprob=near.behaviour_logprob if options["is_cap"] or draw(st.booleans()) else None,
        )
    return case


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    case=cases(),
    budget=st.sampled_from([4_000, 40_000, 512 << 20]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_fused_equals_float64_over_every_option(backend, case, budget, dtype):
    # The slope logp - ref of k2, say, may be all cancellation of numbers that are exact to 2e-5: what the gradient
    # could be at most then sets the scale, not what is left of it.
    floor = 0.05 * case.token_weight.max().item() * min(case.hidden.abs().max().item(), case.weight.abs().max().item())
    case = replace(case, hidden=case.hidden.to(dtype), weight=case.weight.to(dtype))
    rtol = GRAD_RTOL if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert_matches(case, backend, grad_rtol=rtol, options=Options(budget=budget), floor=floor)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(case=cases(), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_any_split_into_micro_batches_adds_up(backend, case, cuts):
    whole, hidden, weight, _bias = call(case, backend)
    whole.loss.backward()
    n = case.target.shape[0]
    edges = [0, *sorted(min(cut, n) for cut in cuts), n]
    loss, dh, dw = 0.0, [], torch.zeros_like(weight)
    for start, stop in itertools.pairwise(edges):
        part, h, w, _ = call(rows(case, torch.arange(start, stop)), backend)
        part.loss.backward()
        loss += part.loss.item()
        dh.append(h.grad)
        dw += w.grad
    assert loss == pytest.approx(whole.loss.item(), rel=1e-5, abs=1e-5 * case.token_weight.sum().item())
    assert relative(torch.cat(dh), hidden.grad.double()) <= GRAD_RTOL
    assert relative(dw, weight.grad.double()) <= GRAD_RTOL


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(case=cases(), data=st.data())
def test_row_order_does_not_matter(backend, case, data):
    order = torch.tensor(data.draw(st.permutations(range(case.target.shape[0]))))
    first, hidden, weight, _ = call(case, backend)
    second, shuffled, other, _ = call(rows(case, order), backend)
    first.loss.backward()
    second.loss.backward()
    torch.testing.assert_close(second.logprob, first.logprob[order], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(second.token_loss, first.token_loss[order], rtol=1e-4, atol=1e-5)
    assert relative(shuffled.grad, hidden.grad[order].double()) <= GRAD_RTOL
    assert relative(other.grad, weight.grad.double()) <= GRAD_RTOL


@pytest.mark.parametrize("backend", BACKENDS)
def test_unused_values_may_be_nan(backend):
    """Guide rows use token_weight only; ignored and weight-0 rows use nothing: NaN and inf there change nothing."""
    case = random_case(n=30, kind="rise", kl_coef=0.1, is_cap=2.0)
    case = with_old_logprobs(case, ref=True, behaviour=True)
    clean, hidden, weight, _ = call(case, backend)
    clean.loss.backward()
    idle = (case.target < 0) | (case.token_weight == 0)
    dirty = replace(case, token_weight=case.token_weight.clone())
    for name in ("advantage", "old_logprob", "ref_logprob", "behaviour_logprob"):
        value = getattr(case, name).clone()
        value[case.is_guide | idle] = float("nan") if name != "old_logprob" else float("inf")
        dirty = replace(dirty, **{name: value})
    dirty.token_weight[case.target < 0] = float("nan")
    out, h, w, _ = call(dirty, backend)
    out.loss.backward()
    for x, y in zip(out, clean):
        assert (x is None and y is None) or torch.equal(x, y)
    assert torch.equal(h.grad, hidden.grad)
    assert torch.equal(w.grad, weight.grad)
