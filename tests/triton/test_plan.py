"""How calls are cut up: within the budget, in whole waves, nothing left out."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rise_kernels.backend import LinearHead, Needs, Options
from rise_kernels.triton_backend import host, launch
from rise_kernels.triton_backend.plan import chunk_rows, chunks, slab_size
from rise_kernels.triton_backend.tiles import TILES


def test_tuning_changes_no_result():
    """One tile width and one number of warps among the candidates: they add in the same order."""
    for tiles in TILES.values():
        assert len({(tile.block_n, tile.num_warps) for tile in tiles}) == 1


def test_qwen3_chunks_fill_waves():
    """512 MiB hold 1766 rows of 151,936 16-bit logits; 13 x 10 tiles fill 98 % of 132 processors."""
    per_row = 2 * 151_936
    assert chunk_rows(8192, 512 << 20, per_row, depth=2560, multiprocessors=132) == 1664
    # where the largest multiple of 128 would leave most of its last wave empty, fewer rows are taken
    rows = chunk_rows(8192, 1 << 30, per_row, depth=5120, multiprocessors=132)
    waves = -(-(rows // 128 * 20) // 132)
    assert rows // 128 * 20 / (132 * waves) > 0.9


@pytest.mark.parametrize("depth, rows", [(2560, 1664), (5120, 1536)])
def test_the_chunks_that_the_documentation_counts_with(monkeypatch, depth, rows):
    """docs/kernels.md: 5 chunks at D = 2560 and 6 at 5120, on 132 processors within the default budget."""
    monkeypatch.setattr(launch, "programs", lambda device: 132)
    monkeypatch.setattr(launch, "cast_bytes", lambda depth, dtype, device: (0, 0))
    hidden, weight = (torch.empty(n, depth, dtype=torch.bfloat16, device="meta") for n in (8192, 151_936))
    kernels = launch.Kernels(LinearHead(hidden, weight, hidden[:, 0].long(), None, 1.0, None))
    plan = host._fused_plan(kernels, Needs(True, True, False), Options().budget, 8192, False)
    assert plan == (rows, 151_936)


@given(
    n=st.integers(1, 40_000), budget=st.integers(1, 1 << 30), per_row=st.integers(1, 1 << 20),
    depth=st.integers(1, 8192), processors=st.integers(1, 200),
)  # fmt: skip
def test_chunks_fit_and_cover(n, budget, per_row, depth, processors):
    rows = chunk_rows(n, budget, per_row, depth=depth, multiprocessors=processors)
    assert 1 <= rows <= n
    assert rows * per_row <= budget or rows == 1
    # at least half of what fits
    assert 2 * rows + 128 > min(n, budget // per_row)
    parts = chunks(0, n, rows)
    assert parts[0].start == 0
    assert parts[-1].stop == n
    assert all(a.stop == b.start for a, b in pairwise(parts))


@given(vocab=st.integers(1, 300_000), budget=st.integers(0, 1 << 30), entry=st.integers(0, 10_000))
def test_slabs_are_whole_tiles(vocab, budget, entry):
    size = slab_size(vocab, budget, entry, 256)
    assert size == vocab or size % 256 == 0
    assert size * entry <= budget or size == min(vocab, 256)
