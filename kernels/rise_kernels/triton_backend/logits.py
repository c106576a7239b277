"""GEMM 1: logits by tiles, which never reach memory as such.

`forward_kernel` leaves per-tile statistics and, where gradients will follow, exponentials; `backward_kernel` computes
the same logits again when the upstream gradient is known and leaves d loss / d logits. Both work on a tile's two
halves, one after the other: half the columns' indices in registers, half the staging in shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import INTERPRETED, LOG2E, soft_capped, to_storage
from .tiles import all_configs, grouped_tile, matching_configs


@triton.jit
def _product_halves(
    hidden, weight, row, col, n_rows, n_cols, depth, hidden_stride, weight_stride,
    DESCRIPTORS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """hidden @ weight.T of one tile in float32: its left and its right half, [BLOCK_M, BLOCK_N // 2] each.

    hidden and weight are tensor descriptors, or pointers (rows beyond the end are computed from
    some other row, and never used).
    """
    product = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if not DESCRIPTORS:
        inner = tl.arange(0, BLOCK_K)
        a_rows = ((row + tl.arange(0, BLOCK_M)) % n_rows).to(tl.int64) * hidden_stride
        b_rows = ((col + tl.arange(0, BLOCK_N)) % n_cols).to(tl.int64) * weight_stride
        a_at = hidden + a_rows[:, None] + inner[None, :]
        b_at = weight + b_rows[:, None] + inner[None, :]
    for k in range(0, depth, BLOCK_K):
        if DESCRIPTORS:
            a = hidden.load([row, k])
            b = weight.load([col, k])
        else:
            a = tl.load(a_at + k, mask=(inner < depth - k)[None, :], other=0.0)
            b = tl.load(b_at + k, mask=(inner < depth - k)[None, :], other=0.0)
        if INTERPRETED:  # its bfloat16 arithmetic is broken
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        product = tl.dot(a, b.T, product, input_precision="ieee")
    return tl.permute(tl.reshape(product, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)).split()


@triton.jit
def _store(
    workspace, values, row, col, n_rows, n_cols, workspace_stride,
    DESCRIPTORS: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """values [BLOCK_M, WIDTH] to the workspace [n_rows, n_cols], a descriptor or a pointer."""
    if DESCRIPTORS:
        workspace.store([row, col], values)
    else:
        rows = row + tl.arange(0, BLOCK_M)
        columns = col + tl.arange(0, WIDTH)
        at = workspace + rows.to(tl.int64)[:, None] * workspace_stride + columns[None, :]
        tl.store(at, values, mask=(rows < n_rows)[:, None] & (columns < n_cols)[None, :])


# Column indices are built from groups of 16: a few registers, where one index per column would be hoisted out of the
# tile loop and spill.
@triton.jit
def _columns(WIDTH: tl.constexpr):
    return tl.reshape(16 * tl.arange(0, WIDTH // 16)[:, None] + tl.arange(0, 16)[None, :], (WIDTH,))


@triton.jit
def _before(limit, WIDTH: tl.constexpr):
    """column < limit, [WIDTH]."""
    return tl.reshape(tl.arange(0, 16)[None, :] < (limit - 16 * tl.arange(0, WIDTH // 16))[:, None], (WIDTH,))


@triton.jit
def _is_column(near, WIDTH: tl.constexpr):
    """column == near, [rows, WIDTH]."""
    within = near[:, None] - 16 * tl.arange(0, WIDTH // 16)[None, :]
    return tl.reshape(tl.arange(0, 16)[None, None, :] == within[:, :, None], (near.shape[0], WIDTH))


@triton.jit
def _logits(
    product, bias, first, vocab, softcap, inverse_temperature,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(z, dz / dproduct) for the vocabulary entries [first, first + WIDTH); z is -inf beyond the vocabulary."""
    valid = _before(vocab - first, WIDTH)
    z = product
    if HAS_BIAS:
        z += tl.load(bias + first + _columns(WIDTH), mask=valid, other=0.0).to(tl.float32)[None, :]
    slope = inverse_temperature
    if HAS_SOFTCAP:
        z = soft_capped(z, softcap)
        t = z * (1.0 / softcap)
        slope = inverse_temperature * (1.0 - t * t)
    z *= inverse_temperature
    return tl.where(valid[None, :], z, float("-inf")), slope


@triton.jit
def _take_out(z, near, WIDTH: tl.constexpr):
    """(column `near` of each row, 0 where it lies outside; z with -inf in its place)."""
    own = _is_column(near, WIDTH)
    return tl.sum(tl.where(own, z, 0.0), axis=1), tl.where(own, float("-inf"), z)


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _exponentials(z, offset, WITH_ENTROPY: tl.constexpr):
    """(e, sum e, sum e log2 e) over the columns of e = exp(z) / 2^offset."""
    z = tl.maximum(z * LOG2E - offset[:, None], -1000.0, propagate_nan=tl.PropagateNan.ALL)  # 0 * -inf would be NaN
    e = tl.exp2(z)
    if WITH_ENTROPY and not INTERPRETED:
        total, slope = tl.reduce((e, e * z), 1, _add_pairs)  # together: e * z never exists as a whole
    else:
        total = tl.sum(e, axis=1)
        slope = tl.sum(e * z, axis=1) if WITH_ENTROPY else total  # the interpreter takes minutes over a tl.reduce
    return e, total, slope


# ARCHITECTURE is there for the key: a process may hold GPUs of two kinds, with tiles of their own.
@triton.autotune(
    all_configs(),
    key=["vocab", "depth", "STORE", "WITH_ENTROPY", "STORAGE", "DESCRIPTORS", "ARCHITECTURE"],
    prune_configs_by={"early_config_prune": matching_configs},
)
@triton.jit(
    do_not_specialize=["n_rows", "n_cols", "first_col"],
    do_not_specialize_on_alignment=["target", "tile_offset", "tile_sum", "tile_slope", "target_logit"],
)
def forward_kernel(
    hidden, weight, bias, target, workspace, tile_offset, tile_sum, tile_slope, target_logit,
    n_rows, n_cols, first_col, vocab, depth, hidden_stride, weight_stride, workspace_stride,
    softcap, inverse_temperature,
    STORE: tl.constexpr, WITH_ENTROPY: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    STORAGE: tl.constexpr, EXTRA_BITS: tl.constexpr, DESCRIPTORS: tl.constexpr, ARCHITECTURE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """The target's logit, and of all *other* logits the statistics of every (row, tile) and (STORE) the exponentials.

    Without the target, 1 - p comes from no cancellation however close p is to 1, and a dominant target takes no
    precision from its neighbours.

    hidden, weight, workspace: descriptors of, or pointers to, [n_rows, depth], [n_cols, depth] (the vocabulary from
    `first_col` on) and [n_rows, n_cols]. With z in base 2, and o the tile's largest z rounded up to an integer less
    EXTRA_BITS (-inf for a tile without any): tile_offset = o, tile_sum = sum 2^(z - o), tile_slope = sum 2^(z - o)
    (z - o), float32 [tiles, n_rows]; workspace = 2^(z - o). An integer offset makes an exponential's rounding the same
    whatever its tile. target_logit float32 [n_rows], natural units.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    tiles_m = tl.cdiv(n_rows, BLOCK_M)
    tiles_n = tl.cdiv(n_cols, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        first = first_col + col
        left, right = _product_halves(
            hidden,
            weight,
            row,
            col,
            n_rows,
            n_cols,
            depth,
            hidden_stride,
            weight_stride,
            DESCRIPTORS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        left, _ = _logits(left, bias, first, vocab, softcap, inverse_temperature, HAS_BIAS, HAS_SOFTCAP, HALF)
        right, _ = _logits(right, bias, first + HALF, vocab, softcap, inverse_temperature, HAS_BIAS, HAS_SOFTCAP, HALF)

        rows = row + tl.arange(0, BLOCK_M)
        inside = rows < n_rows
        near = tl.load(target + rows, mask=inside, other=-1).to(tl.int32) - first
        here = (near >= 0) & (near < BLOCK_N)
        own_left, left = _take_out(left, near, HALF)
        own_right, right = _take_out(right, near - HALF, HALF)
        tl.store(target_logit + rows, own_left + own_right, mask=inside & here)

        largest = tl.maximum(tl.max(left, axis=1), tl.max(right, axis=1)) * LOG2E
        empty = largest == float("-inf")
        offset = tl.where(empty, 0.0, tl.ceil(largest) - EXTRA_BITS)
        statistic = (first_col // BLOCK_N + tile_n).to(tl.int64) * n_rows + rows
        tl.store(tile_offset + statistic, tl.where(empty, largest, offset), mask=inside)
        e, total_left, slope_left = _exponentials(left, offset, WITH_ENTROPY)
        if STORE:
            e = e.to(STORAGE)
            _store(workspace, e, row, col, n_rows, n_cols, workspace_stride, DESCRIPTORS, BLOCK_M, HALF)
        e, total_right, slope_right = _exponentials(right, offset, WITH_ENTROPY)
        if STORE:
            e = e.to(STORAGE)
            _store(workspace, e, row, col + HALF, n_rows, n_cols, workspace_stride, DESCRIPTORS, BLOCK_M, HALF)
        tl.store(tile_sum + statistic, total_left + total_right, mask=inside)
        if WITH_ENTROPY:
            tl.store(tile_slope + statistic, slope_left + slope_right, mask=inside)


@triton.jit
def _dlogits(z, slope, near, logsumexp, entropy, own, spread, tilt, HAS_TILT: tl.constexpr, WIDTH: tl.constexpr):
    z -= logsumexp[:, None]
    p = tl.exp2(z * LOG2E)
    if HAS_TILT:
        dz = p * (spread[:, None] - tilt[:, None] * (tl.maximum(z, -1000.0) + entropy[:, None]))
    else:
        dz = p * spread[:, None]
    return tl.where(_is_column(near, WIDTH), own[:, None], dz) * slope


@triton.autotune(
    all_configs(),
    key=["vocab", "depth", "HAS_TILT", "STORAGE", "DESCRIPTORS", "ARCHITECTURE"],
    prune_configs_by={"early_config_prune": matching_configs},
)
@triton.jit(
    do_not_specialize=["n_rows", "n_cols", "first_col"],
    do_not_specialize_on_alignment=["target", "logsumexp", "entropy", "own_grad", "other_grad", "grad_entropy"],
)
def backward_kernel(
    hidden, weight, bias, target, workspace, logsumexp, entropy, own_grad, other_grad, grad_entropy,
    n_rows, n_cols, first_col, vocab, depth, hidden_stride, weight_stride, workspace_stride,
    softcap, inverse_temperature,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TILT: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    STORAGE: tl.constexpr, DESCRIPTORS: tl.constexpr, ARCHITECTURE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """workspace [n_rows, n_cols] = d loss / d (h.w + b). With float32 [n_rows] vectors, d loss / d z is own_grad at the
    target and

        p_j (other_grad - grad_entropy (log p_j + entropy))

    elsewhere; the entropy term exists if HAS_TILT.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    tiles_m = tl.cdiv(n_rows, BLOCK_M)
    tiles_n = tl.cdiv(n_cols, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        first = first_col + col
        left, right = _product_halves(
            hidden,
            weight,
            row,
            col,
            n_rows,
            n_cols,
            depth,
            hidden_stride,
            weight_stride,
            DESCRIPTORS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )

        rows = row + tl.arange(0, BLOCK_M)
        inside = rows < n_rows
        near = tl.load(target + rows, mask=inside, other=-1).to(tl.int32) - first
        lse = tl.load(logsumexp + rows, mask=inside, other=0.0)
        own = tl.load(own_grad + rows, mask=inside, other=0.0)
        spread = tl.load(other_grad + rows, mask=inside, other=0.0)
        mean = lse
        tilt = lse
        if HAS_TILT:
            mean = tl.load(entropy + rows, mask=inside, other=0.0)
            tilt = tl.load(grad_entropy + rows, mask=inside, other=0.0)

        z, slope = _logits(left, bias, first, vocab, softcap, inverse_temperature, HAS_BIAS, HAS_SOFTCAP, HALF)
        dz = _dlogits(z, slope, near, lse, mean, own, spread, tilt, HAS_TILT, HALF)
        dz = to_storage(dz, GRAD_DTYPE, STORAGE)
        _store(workspace, dz, row, col, n_rows, n_cols, workspace_stride, DESCRIPTORS, BLOCK_M, HALF)
        z, slope = _logits(right, bias, first + HALF, vocab, softcap, inverse_temperature, HAS_BIAS, HAS_SOFTCAP, HALF)
        dz = _dlogits(z, slope, near - HALF, lse, mean, own, spread, tilt, HAS_TILT, HALF)
        dz = to_storage(dz, GRAD_DTYPE, STORAGE)
        _store(workspace, dz, row, col + HALF, n_rows, n_cols, workspace_stride, DESCRIPTORS, BLOCK_M, HALF)
