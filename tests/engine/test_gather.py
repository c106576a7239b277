"""In bfloat16, gradients of rows that many tokens use are summed in float32: one rounding, and no bias downwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from rise_engine.config import EngineConfig
from rise_engine.gather import Embedding, gather_rows
from rise_engine.policy import PolicyEngine
from tests.engine.helpers import a_step

ROUNDING = 2**-8  # twice the unit roundoff of bfloat16: torch's rounding of the sum, and one of a tie's float32 sum


def uneven(n: int, *shape: int) -> torch.Tensor:
    """Gradients of which the first is 500 times the others, as bfloat16 values."""
    g = torch.Generator().manual_seed(0)
    values = (1 + torch.rand(n, *shape, generator=g)) / 500
    values[0] *= 500
    return values.bfloat16()


def summed(index: torch.Tensor, gradient: torch.Tensor, rows: int) -> torch.Tensor:
    total = torch.zeros(rows, *gradient.shape[1:], dtype=torch.float64)
    for i, g in zip(index.tolist(), gradient.double()):
        total[i] += g
    return total


def test_gathered_rows_and_their_gradient():
    index = torch.tensor([2] * 100 + [0, 4, 0, 2])
    source = torch.randn(5, 2, 3).bfloat16().requires_grad_()
    gradient = uneven(len(index), 2, 3)
    picked = gather_rows(source, index)
    assert torch.equal(picked, source[index])
    picked.backward(gradient)
    expected = summed(index, gradient, 5)
    torch.testing.assert_close(source.grad.double(), expected, rtol=ROUNDING, atol=0)
    naive = torch.autograd.grad(source[index], source, gradient)[0].double()
    assert (naive[2] < 0.95 * expected[2]).all()


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_equals_torchs_but_for_rounding(padding_idx, dtype):
    plain = nn.Embedding(12, 4, padding_idx=padding_idx, dtype=dtype)
    ours = Embedding(plain)
    assert ours.weight is plain.weight
    tokens = torch.tensor([[7] * 60 + [3, 11], [7] * 60 + [0, 3]])
    gradient = uneven(tokens.numel(), 4).to(dtype)
    assert torch.equal(ours(tokens), plain(tokens))
    ours(tokens).backward(gradient.unflatten(0, tokens.shape))
    expected = summed(tokens.flatten(), gradient, 12)
    if padding_idx is not None:
        expected[padding_idx] = 0
    torch.testing.assert_close(ours.weight.grad.double(), expected, rtol=ROUNDING, atol=0)


def test_a_frozen_embedding_has_no_gradient():
    ours = Embedding(nn.Embedding(12, 4, dtype=torch.bfloat16).requires_grad_(False))
    assert not ours(torch.tensor([[1, 2]])).requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["shared_prompt", "padded"])
def test_many_light_sequences_beside_a_heavy_one_lose_nothing(tiny_folder, layout):
    """51 sequences of one prompt in one micro-batch; torch's sums would lose 0.9 % of the norm packed, 2 % padded.

    Nothing else differs: the weights are powers of two, by which rounding is the same, and at 2^-60 the light ones are
    computed too, so that every product has the same shape (another shape moves the norm by 0.2 % on some CPUs).
    """
    heavy = a_step(prompts=1)[0]
    norms = []
    for share in (2**-60, 2**-9):
        policy = PolicyEngine(
            tiny_folder("qwen3-tied"), EngineConfig(dtype="bfloat16", zero_stage=2, micro_batch_tokens=10_000)
        )
        policy.layout = layout
        light = replace(heavy, token_weight=heavy.token_weight * share)
        stats = policy.train_step([heavy] + [light] * 50, temperature=1.0)
        assert stats.micro_batches == 1
        norms.append(stats.grad_norm)
    assert norms[1] == pytest.approx((1 + 50 * 2**-9) * norms[0], rel=2**-9)
