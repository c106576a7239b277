"""Statistics [tiles, rows] of more than 2^31 entries, as a budget of many GiB allows: no offset wraps at 32 bits.

Untouched pages cost nothing, so the buffer can be that large.
"""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from rise_kernels.triton_backend.logits import forward_kernel
from rise_kernels.triton_backend.rows import dlogits_kernel, statistics_kernel
from tests.triton.on_device import interpreted

pytestmark = [pytest.mark.slow, interpreted]

ROWS, TILES = (1 << 30) + 64, 3


@pytest.fixture
def statistics():
    """float32 [TILES, ROWS]."""
    return torch.empty(TILES * ROWS).view(TILES, ROWS)


def test_statistics_are_read_there(statistics):
    """One program of 32 rows; offset and sum are the same numbers, o: log2 of the total of 2^o o."""
    first = torch.arange(1.0, 1 + 32)
    statistics[:, :32] = first
    target_logit = torch.full((32,), -float("inf"))
    logprob, logsumexp = torch.empty(32), torch.empty(32)
    statistics_kernel[(1,)](
        statistics, statistics, None, target_logit, logprob, logsumexp, None, ROWS, TILES,
        WITH_ENTROPY=False, BLOCK_ROWS=32, BLOCK_TILES=4,
    )  # fmt: skip
    torch.testing.assert_close(logsumexp, (first + torch.log2(3 * first)) * 0.6931472)


def test_offsets_of_exponentials_are_read_there(statistics):
    """The last tile of 64 columns of 32 rows: p = e 2^offset."""
    statistics[:, :32] = torch.arange(TILES)[:, None]
    workspace = torch.ones(32, 64 * TILES, dtype=torch.float16)
    zeros, ones = torch.zeros(32), torch.ones(32)
    dlogits_kernel[(TILES, 1)](
        workspace, workspace.stride(0), statistics, torch.zeros(32, dtype=torch.int64), zeros, zeros, ones, ones,
        ROWS, 64 * TILES, 1.0, 0.0, HAS_SOFTCAP=False, GRAD_DTYPE=tl.float16, BLOCK_ROWS=32, BLOCK_N=64,
    )  # fmt: skip
    assert torch.equal(workspace, torch.tensor([1.0, 2.0, 4.0]).half().repeat_interleave(64).expand(32, -1))


def test_statistics_are_written_there(statistics):
    """The slab that begins at the largest 32-bit column, of 300 rows."""
    n, first = 300, (1 << 31) - 512
    hidden, weight, target = torch.zeros(n, 8), torch.zeros(8, 8), torch.zeros(n, dtype=torch.int64)
    forward_kernel[(1,)](
        hidden, weight, None, target, None, statistics, statistics, None, torch.empty(n),
        n, 8, first, first + 8, 8, 8, 8, 0, 0.0, 1.0,
        STORE=False, WITH_ENTROPY=False, HAS_BIAS=False, HAS_SOFTCAP=False, STORAGE=tl.float32, EXTRA_BITS=0,
        DESCRIPTORS=False, ARCHITECTURE=9,
    )  # fmt: skip
    tile = first // 256
    assert tile * n > 2**31
    found = statistics.flatten()[tile * n : (tile + 1) * n]
    assert torch.equal(found, torch.full((n,), 8.0))  # eight logits of 0; written after their offset
