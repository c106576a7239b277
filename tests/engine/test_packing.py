"""Every sequence in exactly one micro-batch, budgets kept, and packed log-probs equal to plain ones."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rise_engine.attention import Layout, Span
from rise_engine.config import EngineConfig
from rise_engine.packing import build, plan
from rise_engine.policy import PolicyEngine
from tests.engine.helpers import a_step, plain_logprobs, plain_model
from tests.tiny import KINDS


@dataclass(frozen=True)
class Tokens:
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]


@st.composite
def steps(draw):
    prompts = [tuple(range(100 * k, 100 * k + draw(st.integers(1, 20)))) for k in range(draw(st.integers(1, 4)))]
    return [
        Tokens(draw(st.sampled_from(prompts)), tuple(range(draw(st.integers(1, 30)))))
        for _ in range(draw(st.integers(0, 20)))
    ]


@settings(max_examples=100, deadline=None)
@given(sequences=steps(), budget=st.integers(1, 120), name=st.sampled_from(["shared_prompt", "padded"]))
def test_plan_covers_every_sequence_once_within_the_budget(sequences, budget, name):
    batches = plan(sequences, budget, name)
    members = [i for chunks in batches for c in chunks for i in c.members]
    assert sorted(members) == list(range(len(sequences)))
    for chunks in batches:
        batch = build(sequences, chunks, name, pad_id=0, device=torch.device("cpu"))
        count = sum(len(c.members) for c in chunks)
        assert batch.tokens <= budget or count == 1
        assert len(batch.target) == len(batch.hidden_rows) == sum(batch.lengths)
    sizes = [max(c.tokens for c in chunks) for chunks in batches]
    assert sizes == sorted(sizes, reverse=True)


def test_a_prompt_shared_by_eight_responses_is_computed_once():
    sequences = [Tokens(tuple(range(50)), (1,) * 10) for _ in range(8)]
    [chunks] = plan(sequences, 4096, "shared_prompt")
    batch = build(sequences, chunks, "shared_prompt", pad_id=0, device=torch.device("cpu"))
    assert batch.tokens == 50 + 8 * 9  # the last token of a response predicts nothing


def test_a_response_longer_than_its_prompt_needs_no_mask():
    """A mask of an 8192-token response is 64 MiB, in float32 four times that, and hides half of what it computes."""
    sequences = [
        Tokens((7, 8, 9), (1, 2, 3, 4)),
        Tokens((5,), (1, 2)),
        Tokens((5,), (1,) * 9),
        Tokens((6,) * 8, (1, 2, 3)),
    ]
    sequences.append(Tokens((6,) * 8, (4, 5)))
    batch = build(
        sequences, plan(sequences, 100, "shared_prompt")[0], "shared_prompt", pad_id=0, device=torch.device("cpu")
    )
    assert batch.layout is not None
    masked = {(b.count, b.queries, b.keys) for b in batch.layout.batches if b.mask(torch.empty(0)) is not None}
    assert masked == {(1, 2, 10), (1, 1, 9)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_mask_for_all_responses_of_a_prompt_and_for_all_layers(dtype):
    lengths = {60: (20, 19, 17, 20), 61: (20, 18)}
    sequences = [Tokens((7,) * n, (1,) * r) for n, responses in lengths.items() for r in responses]
    batch = build(
        sequences, plan(sequences, 1000, "shared_prompt")[0], "shared_prompt", pad_id=0, device=torch.device("cpu")
    )
    masked = [b for b in batch.layout.batches if b.prompt]
    assert {(b.count, b.queries, b.keys, b.prompt) for b in masked} == {(4, 19, 79, 60), (2, 19, 80, 61)}
    q, k, v = (torch.randn(batch.tokens, n, 8, dtype=dtype, requires_grad=True) for n in (4, 2, 2))
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] in {(b.queries, b.keys) for b in masked}:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layers = [batch.layout.attend(q, k, v, None, 0.0) for _ in range(3)]
    assert len(layers) == 3
    assert len(saved) == len(masked)
    for mask in saved.values():
        assert mask.dtype == dtype
        assert mask.untyped_storage().nbytes() == 19 * 80 * dtype.itemsize  # rows begin at multiples of 8


@pytest.mark.parametrize("every_head", [False, True])
def test_layout_attends_like_the_written_out_mask(monkeypatch, every_head):
    """Against softmax attention under a mask built token by token from the definition; with grouped heads as they are,
    and repeated as on a GPU.
    """
    monkeypatch.setattr("rise_engine.attention._needs_every_head", lambda query, mask: every_head)
    torch.manual_seed(0)
    spans = [Span(0, 5), Span(5, 8, 0, 5), Span(8, 9, 0, 5), Span(9, 12), Span(12, 21, 9, 12), Span(21, 28, 9, 12)]
    assert {s.square for s in spans} == {True, False}
    total, heads, kv_heads, d = 28, 4, 2, 8
    q = torch.randn(1, heads, total, d)
    k, v = torch.randn(1, kv_heads, total, d), torch.randn(1, kv_heads, total, d)
    allowed = torch.zeros(total, total, dtype=torch.bool)
    for s in spans:
        for i in range(s.start, s.stop):
            allowed[i, s.prompt_start : s.prompt_stop] = True
            allowed[i, s.start : i + 1] = True
    kk, vv = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    scores = (q.double() @ kk.transpose(-1, -2) * d**-0.5).masked_fill(~allowed, float("-inf"))
    expected = (scores.softmax(-1) @ vv).transpose(1, 2)

    from rise_engine.attention import packed_attention

    layout = Layout.of(spans, torch.device("cpu"))
    found, _ = packed_attention(torch.nn.Module(), q, k, v, None, scaling=d**-0.5, layout=layout)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["shared_prompt", "padded"])
def test_packed_logprobs_equal_unpacked_ones(tiny_folder, kind, layout):
    policy = PolicyEngine(tiny_folder(kind), EngineConfig(micro_batch_tokens=45))
    assert policy.layout == "shared_prompt"
    policy.layout = layout
    plain = plain_model(tiny_folder(kind)).eval()
    prompts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for s in a_step():
        prompts.setdefault(s.prompt_ids, []).append(s.response_ids)
    with torch.no_grad():
        for prompt, responses in prompts.items():
            found = policy.logprobs(prompt, responses, temperature=0.7)
            for response, values in zip(responses, found):
                expected = plain_logprobs(plain, prompt, response, 0.7)
                torch.testing.assert_close(values, expected, atol=2e-5, rtol=1e-5)


def test_sliding_window_models_fall_back_to_padding(tmp_path):
    """Packed attention knows no windows, so it must not be used for a model that has them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rise_engine.attention import why_not_packed

    shape = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    shape |= {"num_key_value_heads": 1, "head_dim": 8}
    windowed = Qwen3Config(**shape, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert "sliding_attention" in why_not_packed(Qwen3ForCausalLM(windowed))
    assert why_not_packed(Qwen3ForCausalLM(Qwen3Config(**shape))) is None
