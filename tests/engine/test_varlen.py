"""Packed rows through flash-attn's varlen call. There is no flash-attn on a CPU: a function with its contract, written
from its documentation, stands in, so that indices, boundaries and the causal alignment are what is tested.
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec

import pytest
import torch

from rise_engine import packing
from rise_engine.attention import Layout, Span
from rise_engine.config import EngineConfig
from rise_engine.policy import PolicyEngine
from rise_engine.varlen import VarlenLayout, why_not_flash
from tests.engine.helpers import a_step
from tests.engine.test_policy import weights

CPU = torch.device("cpu")
SPANS = [Span(0, 5), Span(5, 8, 0, 5), Span(8, 9, 0, 5), Span(9, 12), Span(12, 21, 9, 12), Span(21, 28, 9, 12)]


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
):
    """The contract of flash-attn 2.1 and later: sequences end to end, and under `causal` the last query of a sequence
    sees its last key ("aligned to the bottom right corner").
    """
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert q.is_contiguous()
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert dropout_p == 0
    assert causal
    assert cu_seqlens_q[-1] == len(q)
    assert cu_seqlens_k[-1] == len(k) == len(v)
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert max_seqlen_k == cu_seqlens_k.diff().max()
    heads = q.shape[1] // k.shape[1]
    out = []
    for i in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[i], cu_seqlens_q[i + 1])
        columns = slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
        keys, values = (x[columns].repeat_interleave(heads, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * (softmax_scale or q.shape[-1] ** -0.5)
        n_q, n_k = scores.shape[1:]
        hidden = torch.ones(n_q, n_k, dtype=torch.bool).tril(n_k - n_q).logical_not()
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))
    return torch.cat(out)


@pytest.fixture
def flash_attn(monkeypatch):
    module = types.ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)


@pytest.mark.usefixtures("flash_attn")
def test_varlen_equals_sdpa_forward_and_backward():
    torch.manual_seed(0)
    shapes = [(28, 4, 8), (28, 2, 8), (28, 2, 8)]
    rows = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]
    upstream = torch.randn(28, 4, 8, dtype=torch.float64)
    results = []
    for kind in (Layout, VarlenLayout):
        out = kind.of(SPANS, CPU).attend(*rows, 0.3, 0.0)
        results.append([out, *torch.autograd.grad(out, rows, upstream)])
    for ours, expected in zip(*results[::-1]):
        torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-10)


def test_spans_that_leave_a_gap_are_refused():
    with pytest.raises(ValueError, match="begin where the one before ends"):
        VarlenLayout.of([Span(0, 5), Span(6, 8, 0, 5)], CPU)


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_training_step_through_it_equals_one_through_sdpa(tiny_folder, monkeypatch, checkpointing):
    keys = {"lr": 0.1, "eps": 1e-2, "warmup_steps": 0, "micro_batch_tokens": 60}
    sdpa = PolicyEngine(tiny_folder("qwen3-tied"), EngineConfig(**keys))
    monkeypatch.setattr(packing, "why_not_flash", lambda dtype: None)
    flash = PolicyEngine(tiny_folder("qwen3-tied"), EngineConfig(**keys, activation_checkpointing=checkpointing))
    assert (sdpa.layout, flash.layout) == ("shared_prompt", "shared_prompt_flash")
    called = []
    monkeypatch.setattr(
        sys.modules["flash_attn"],
        "flash_attn_varlen_func",
        lambda *a, **k: called.append(1) or flash_attn_varlen_func(*a, **k),
    )
    ours, expected = (p.train_step(a_step(), temperature=0.7) for p in (flash, sdpa))
    assert len(called) == ours.micro_batches * 2 * (1 + checkpointing)  # two layers, computed again when checkpointed
    for a, b in zip(*(p.logprobs((5, 6), [(7, 8, 9), (10,)], temperature=0.7) for p in (flash, sdpa))):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)
    assert ours.loss == pytest.approx(expected.loss, rel=1e-5)
    assert ours.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    for name, value in weights(sdpa).items():
        torch.testing.assert_close(weights(flash)[name], value, atol=1e-5, rtol=1e-4)


def test_what_is_missing_is_named(tiny_folder, monkeypatch):
    with pytest.raises(
        ValueError, match=r"engine\.attention: flash_attention_2 cannot be used: .* needs a CUDA device"
    ):
        PolicyEngine(tiny_folder("llama"), EngineConfig(attention="flash_attention_2"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "engine.dtype is float32" in why_not_flash(torch.float32)
    assert "pip install flash-attn" in why_not_flash(torch.bfloat16)


@pytest.mark.usefixtures("flash_attn")
def test_auto_takes_it_where_it_can_run(tiny_folder, monkeypatch):
    from rise_engine.loading import load_model

    def choose(wanted, dtype=torch.bfloat16):
        return packing.choose_layout(load_model(tiny_folder("llama"), dtype=dtype, attention="sdpa"), wanted)

    assert choose("auto") == choose("sdpa") == "shared_prompt"
    assert choose("eager") == "padded"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert choose("auto") == choose("flash_attention_2") == "shared_prompt_flash"
    assert choose("auto", torch.float32) == choose("sdpa") == "shared_prompt"
