"""Elementary functions for the kernels, written so that the compiled and the interpreted kernel agree.

Triton has no expm1, log1p or tanh that also runs under the interpreter, and the interpreter's bfloat16 cast truncates.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def clamp(x, low, high):
    """min(max(x, low), high), and NaN stays NaN (tl.minimum would drop it)."""
    x = tl.where(x < low, low, x)
    return tl.where(x > high, high, x)


@triton.jit
def expm1(x):
    """exp(x) - 1, to float32 rounding near 0: Taylor's series up to |x| = 1/2, beyond which little cancels."""
    series = 1.0 / 3628800
    series = series * x + 1.0 / 362880
    series = series * x + 1.0 / 40320
    series = series * x + 1.0 / 5040
    series = series * x + 1.0 / 720
    series = series * x + 1.0 / 120
    series = series * x + 1.0 / 24
    series = series * x + 1.0 / 6
    series = series * x + 0.5
    series = series * x * x + x
    return tl.where(tl.abs(x) < 0.5, series, tl.exp(x) - 1.0)


@triton.jit
def log1p_unit(x):
    """log(1 + x) for x in [0, 1], to float32 rounding: 2 atanh(s) with s = x / (2 + x) <= 1/3."""
    s = x / (2.0 + x)
    square = s * s
    series = 1.0 / 17
    series = series * square + 1.0 / 15
    series = series * square + 1.0 / 13
    series = series * square + 1.0 / 11
    series = series * square + 1.0 / 9
    series = series * square + 1.0 / 7
    series = series * square + 1.0 / 5
    series = series * square + 1.0 / 3
    series = series * square + 1.0
    return 2.0 * s * series


@triton.jit
def softplus(x):
    """log(1 + exp(x)) without overflow, and relatively exact where it is tiny."""
    return tl.where(x > 0, x, 0.0) + log1p_unit(tl.exp(-tl.abs(x)))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), relatively exact on both sides."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def soft_capped(z, softcap):
    """softcap tanh(z / softcap). Up to |z| = 3/4 softcap it is z (1 + u Q(u)) with u = (z / softcap)^2 (minimax to 2e-8
    of softcap), which hardly rounds z however large the softcap; beyond it softcap (1 - 2 / (exp(2|z| / softcap) + 1)).
    """
    inverse = 1.0 / softcap  # a division per logit would cost registers: spills
    square = (z * inverse) * (z * inverse)
    series = -0.004626107
    series = series * square + 0.019455329
    series = series * square - 0.053282302
    series = series * square + 0.13324249
    series = series * square - 0.33332908
    series = series * square * z + z
    cap = tl.where(z < 0, -softcap, softcap)  # the sign here, not on the result: that spills
    beyond = cap - (2.0 * cap) / (tl.exp2(tl.abs(z) * (inverse * (2.0 * LOG2E))) + 1.0)
    return tl.where(square < 0.5625, series, beyond)


@triton.jit
def to_storage(x, grad_dtype: tl.constexpr, storage_dtype: tl.constexpr):
    """float32 x rounded to nearest even in `grad_dtype`, as the bits the workspace holds.

    A 16-bit workspace is typed float16 whichever of the two formats lies in it, so one buffer serves both in turn.
    float16 saturates: an infinity would make NaN of every gradient that the products add it to.
    """
    if grad_dtype == tl.float16:
        x = clamp(x, -65504.0, 65504.0)
    if grad_dtype != tl.bfloat16:
        return x.to(storage_dtype)
    elif INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, 0x7FC0, rounded)
        return rounded.to(tl.int16).to(storage_dtype, bitcast=True)
    else:
        return x.to(tl.bfloat16).to(storage_dtype, bitcast=True)
