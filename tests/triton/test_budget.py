"""Within the budget to the last few vectors: what a chunk holds beside its logits is counted too."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils._pytree import tree_leaves

from rise_kernels.backend import LinearHead, Needs, Options
from rise_kernels.token_losses import LossSpec, TokenRows
from rise_kernels.triton_backend import backend
from rise_kernels.triton_backend.launch import Kernels
from tests.kernels.memory import LiveBytes
from tests.triton.on_device import DEVICE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(DEVICE == "cuda", reason="counts bytes: run on the interpreter")]


@pytest.fixture(autouse=True)
def no_garbage(monkeypatch):
    """The interpreter leaves each launch's arguments to the garbage collector."""
    hidden = Kernels.hidden
    monkeypatch.setattr(Kernels, "hidden", lambda self, part: (gc.collect(), hidden(self, part))[1])


def random_head(n, d, v, *, bias=False, gathered=False) -> LinearHead:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n * (1 + gathered), d, generator=g) / d**0.5
    order = torch.arange(n) * 2 if gathered else None
    return LinearHead(
        hidden, torch.randn(v, d, generator=g), torch.arange(n), torch.zeros(v) if bias else None, 1.0, None, order
    )


def beyond_results(function, head, budget) -> int:
    """The most bytes that one call of the backend holds at a time, less those it returns."""
    n, options, ones = head.n, Options(budget=budget), torch.ones(head.n)
    needs = Needs(True, True, head.bias is not None)
    stats = backend.stats(head, with_entropy=False, options=Options()) if function == "stats_backward" else None
    with LiveBytes() as memory:
        if function == "stats":
            out = backend.stats(head, with_entropy=True, options=options)
        elif function == "stats_backward":
            out = backend.stats_backward(head, stats, ones, None, None, needs=needs, options=options)
        else:
            out = backend.fused_loss(
                head, TokenRows(ones, ones > 0), LossSpec(), scale=torch.ones(()), n_grad=n, with_entropy=True,
                needs=needs, options=options,
            )  # fmt: skip
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tree_leaves(out) if x is not None}
    return memory.peak - sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    "function, shape, also, budget",
    [
        # 25 tiles: a row's statistics are 300 bytes
        ("stats", (12, 8, 6400), "", 2 << 10),
        # the bias's gradient of a slab, 4 bytes an entry, is formed before it is added
        ("fused_loss", (3, 8, 6400), "bias", 64 << 10),
        ("stats_backward", (3, 8, 6400), "bias", 32 << 10),
        # one chunk's copy of its hidden states is gone before the next is made
        ("stats", (40, 256, 512), "gathered", 32 << 10),
        ("fused_loss", (14, 256, 2048), "gathered", 64 << 10),
        ("stats_backward", (32, 256, 2048), "gathered", 64 << 10),
    ],
    ids=["tiles", "bias-loss", "bias-logprob", "gathered-stats", "gathered-loss", "gathered-logprob"],
)
def test_peak(function, shape, also, budget):
    head = random_head(*shape, bias=also == "bias", gathered=also == "gathered")
    vectors = 16 * 4 * head.n
    assert beyond_results(function, head, budget) <= budget + vectors
