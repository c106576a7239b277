"""The cheap kernels between the GEMMs: each row's numbers, and exponentials to d loss / d logits in place."""

from __future__ import annotations

import triton
import triton.language as tl

from .elementary import LN2, LOG2E, log1p_unit, to_storage
from .row_losses import guide_loss, importance_factor, kl_estimate, surrogate

# Chunks begin at any row, so no variant is compiled for vectors that happen to be aligned.
_STATISTICS = ["tile_offset", "tile_sum", "tile_slope", "target_logit", "logprob_out", "logsumexp_out", "entropy_out"]
_LOSSES = [
    "token_weight", "is_guide", "advantage", "old_logprob", "ref_logprob", "behaviour_logprob", "scale",
    "loss_out", "dloss_out", "ratio_out", "clipped_out", "support_out", "kl_out", "own_grad_out", "other_grad_out",
]  # fmt: skip
_DLOGITS = ["tile_offset", "target", "logprob", "logsumexp", "own_grad", "other_grad"]


@triton.jit
def _row_statistics(
    tile_offset, tile_sum, tile_slope, target_logit, row, inside, n_rows, n_tiles,
    WITH_ENTROPY: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """(logprob, logsumexp, entropy, 1 - p), reduced over the tiles in a fixed order."""
    own = tl.load(target_logit + row, mask=inside, other=0.0) * LOG2E
    highest = own
    rest = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    slope = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    for start in range(0, n_tiles, BLOCK_TILES):
        tile = start + tl.arange(0, BLOCK_TILES)
        at = tile.to(tl.int64)[:, None] * n_rows + row[None, :]
        mask = (tile < n_tiles)[:, None] & inside[None, :]
        offset = tl.load(tile_offset + at, mask=mask, other=float("-inf"))
        part = tl.load(tile_sum + at, mask=mask, other=0.0)
        new = tl.maximum(highest, tl.max(offset, axis=0))
        base = tl.where(new == float("-inf"), 0.0, new)  # nothing finite so far: the sums stay 0, not NaN
        down = tl.maximum(offset - base[None, :], -1000.0)  # 2^-1000 is 0, and 0 * inf would not be
        step = tl.maximum(highest - base, -1000.0)
        share = tl.exp2(down)
        if WITH_ENTROPY:
            fine = tl.load(tile_slope + at, mask=mask, other=0.0)
            slope = tl.exp2(step) * (slope + step * rest) + tl.sum(share * (fine + down * part), axis=0)
        rest = rest * tl.exp2(step) + tl.sum(share * part, axis=0)
        highest = new
    distance = own - highest
    own_share = tl.exp2(distance)
    total = rest + own_share
    log2_total = tl.log2(total)
    odds = rest / own_share
    # For p >= 1/2 from the odds, so that log-probs near 0 keep their digits.
    logprob = tl.where(odds <= 1.0, -log1p_unit(odds), (distance - log2_total) * LN2)
    entropy = log2_total
    if WITH_ENTROPY:
        slope += own_share * tl.maximum(distance, -1000.0)
        entropy = (log2_total - slope / total) * LN2
    return logprob, (highest + log2_total) * LN2, entropy, rest / total


@triton.jit(do_not_specialize=["n_rows", "n_tiles"], do_not_specialize_on_alignment=_STATISTICS)
def statistics_kernel(
    tile_offset, tile_sum, tile_slope, target_logit, logprob_out, logsumexp_out, entropy_out, n_rows, n_tiles,
    WITH_ENTROPY: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """Per-tile statistics [n_tiles, n_rows] to log-prob, logsumexp and entropy, float32 [n_rows]."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = row < n_rows
    logprob, logsumexp, entropy, _ = _row_statistics(
        tile_offset, tile_sum, tile_slope, target_logit, row, inside, n_rows, n_tiles,
        WITH_ENTROPY, BLOCK_ROWS, BLOCK_TILES,
    )  # fmt: skip
    tl.store(logprob_out + row, logprob, mask=inside)
    tl.store(logsumexp_out + row, logsumexp, mask=inside)
    if WITH_ENTROPY:
        tl.store(entropy_out + row, entropy, mask=inside)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"], do_not_specialize_on_alignment=_STATISTICS + _LOSSES)
def loss_kernel(
    tile_offset, tile_sum, tile_slope, target_logit, logprob_out, logsumexp_out, entropy_out, n_rows, n_tiles,
    token_weight, is_guide, advantage, old_logprob, ref_logprob, behaviour_logprob, scale,
    loss_out, dloss_out, ratio_out, clipped_out, support_out, kl_out, own_grad_out, other_grad_out,
    log_gamma, ratio_low, ratio_high, dual_clip, kl_coef, is_cap,
    HAS_POLICY: tl.constexpr, HAS_OLD: tl.constexpr, HAS_REF: tl.constexpr, HAS_BEHAVIOUR: tl.constexpr,
    HAS_DUAL: tl.constexpr, HAS_CAP: tl.constexpr, HAS_KL: tl.constexpr, KL_ESTIMATOR: tl.constexpr,
    GUIDE: tl.constexpr,
    WITH_ENTROPY: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """`statistics_kernel`, and on top of it both token losses (`rise_kernels.token_losses`); float32 [n_rows],
    clipped_out int8. With c = scale * token_weight * dloss/dlogprob: own_grad_out = c (1 - p) is d loss / d z at the
    target, other_grad_out = -c what the other entries' probabilities are multiplied by."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = row < n_rows
    logprob, logsumexp, entropy, rest = _row_statistics(
        tile_offset, tile_sum, tile_slope, target_logit, row, inside, n_rows, n_tiles,
        WITH_ENTROPY, BLOCK_ROWS, BLOCK_TILES,
    )  # fmt: skip
    tl.store(logprob_out + row, logprob, mask=inside)
    tl.store(logsumexp_out + row, logsumexp, mask=inside)
    if WITH_ENTROPY:
        tl.store(entropy_out + row, entropy, mask=inside)

    guide = tl.load(is_guide + row, mask=inside, other=0) != 0
    loss, dloss, support = guide_loss(logprob, log_gamma, GUIDE)
    ratio = tl.zeros_like(loss)
    clipped = row < 0
    if HAS_POLICY:
        old = logprob
        if HAS_OLD:
            old = tl.load(old_logprob + row, mask=inside, other=0.0)
        value, slope, ratio, clipped = surrogate(
            logprob, old, tl.load(advantage + row, mask=inside, other=0.0), ratio_low, ratio_high, dual_clip, HAS_DUAL
        )
        if HAS_BEHAVIOUR:
            behaviour = tl.load(behaviour_logprob + row, mask=inside, other=0.0)
            factor = importance_factor(old, behaviour, is_cap, HAS_CAP)
            value *= factor
            slope *= factor
        if HAS_REF:
            ref = tl.load(ref_logprob + row, mask=inside, other=0.0)
            kl, dkl = kl_estimate(logprob, ref, old, KL_ESTIMATOR)
            tl.store(kl_out + row, tl.where(guide, 0.0, kl), mask=inside)
            if HAS_KL:
                value += kl_coef * kl
                slope += kl_coef * dkl
        loss = tl.where(guide, loss, value)
        dloss = tl.where(guide, dloss, slope)
        ratio = tl.where(guide, 0.0, ratio)
        clipped = clipped & ~guide
    tl.store(loss_out + row, loss, mask=inside)
    tl.store(dloss_out + row, dloss, mask=inside)
    tl.store(ratio_out + row, ratio, mask=inside)
    tl.store(clipped_out + row, clipped.to(tl.int8), mask=inside)
    tl.store(support_out + row, tl.where(guide, support, 0.0), mask=inside)
    weight = tl.load(token_weight + row, mask=inside, other=0.0)
    coefficient = tl.load(scale) * weight * dloss
    tl.store(own_grad_out + row, coefficient * rest, mask=inside)
    tl.store(other_grad_out + row, -coefficient, mask=inside)


@triton.jit(do_not_specialize=["n_rows"], do_not_specialize_on_alignment=_DLOGITS)
def dlogits_kernel(
    workspace, stride, tile_offset, target, logprob, logsumexp, own_grad, other_grad,
    n_rows, vocab, temperature, softcap,
    HAS_SOFTCAP: tl.constexpr, GRAD_DTYPE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """workspace [n_rows, stride], in place: exponentials -> d loss / d (h.w + b).

    One program owns one block and reads all of it before it writes: nothing depends on the order of programs.
    """
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = row < n_rows
    tile = tl.program_id(0)
    col = tl.arange(0, BLOCK_N)
    mask = inside[:, None] & (col < vocab - tile * BLOCK_N)[None, :]
    at = workspace + row.to(tl.int64)[:, None] * stride + tile * BLOCK_N + col[None, :]
    e = tl.load(at, mask=mask, other=0.0).to(tl.float32)

    lse = tl.load(logsumexp + row, mask=inside, other=0.0)
    own_dz = tl.load(own_grad + row, mask=inside, other=0.0)
    other_dz = tl.load(other_grad + row, mask=inside, other=0.0)
    near = tl.load(target + row, mask=inside, other=-1).to(tl.int32) - tile * BLOCK_N
    offset = tl.load(tile_offset + tile.to(tl.int64) * n_rows + row, mask=inside, other=0.0)
    p = e * tl.exp2(offset - lse / LN2)[:, None]
    own = col[None, :] == near[:, None]
    dz = tl.where(own, own_dz[:, None], other_dz[:, None] * p)
    if HAS_SOFTCAP:
        # z from its own probability; where that is 0, so is the gradient
        own_logprob = tl.load(logprob + row, mask=inside, other=0.0)
        log_p = tl.where(own, own_logprob[:, None], tl.log(tl.where(p > 0, p, 1.0)))
        t = (log_p + lse[:, None]) * (temperature / softcap)
        dz *= tl.maximum(1.0 - t * t, 0.0)
    tl.store(at, to_storage(dz / temperature, GRAD_DTYPE, workspace.dtype.element_ty), mask=mask)
