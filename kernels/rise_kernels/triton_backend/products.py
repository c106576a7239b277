"""Operands and the two gradient products, which cuBLAS does through torch; and the byte counts they need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CPU_SLAB = 64  # vocabulary entries at a time where 16-bit products are done in float32


def padded(columns: int, itemsize: int) -> int:
    """`columns` rounded up so that rows begin at multiples of 128 bytes."""
    step = 128 // itemsize
    return -(-columns // step) * step


def is_ready(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel can read the matrix x as it stands: its type, contiguous rows that do not overlap (a descriptor
    takes no stride of 0), 16-byte alignment.
    """
    row = x.stride(0) * x.element_size()
    rows_in_place = x.stride(1) == 1 and x.stride(0) >= x.shape[1]
    return x.dtype == dtype and rows_in_place and row % 16 == 0 and x.data_ptr() % 16 == 0


def ready(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [m, d], or a copy of it that `is_ready`."""
    if is_ready(x, dtype):
        return x
    return aligned(x.shape[0], x.shape[1], dtype, x.device).copy_(x)


def aligned(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty matrix [rows, columns] that `is_ready`."""
    return torch.empty(rows, padded(columns, dtype.itemsize), dtype=dtype, device=device)[:, :columns]


@dataclass(frozen=True)
class Slab:
    """Vocabulary entries [start, stop) and their weight, ready for the kernels."""

    start: int
    stop: int
    weight: Tensor


def add_product(out: Tensor, a: Tensor, b: Tensor, *, first: bool, alpha: float) -> None:
    """out (+)= alpha a @ b; = for the first. out float32, a and b of one type."""
    beta = 0 if first else 1
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(out, a, b, out_dtype=torch.float32, beta=beta, alpha=alpha, out=out)
    else:
        torch.addmm(out, a.float(), b.float(), beta=beta, alpha=alpha, out=out)


def add_hidden_grad(out: Tensor, dlogits: Tensor, weight: Tensor, *, first: bool, alpha: float) -> None:
    """out [m, D] (+)= alpha dlogits [m, v] @ weight [v, D]."""
    for part in _parts(dlogits):
        add_product(out, dlogits[:, part], weight[part], first=first and not part.start, alpha=alpha)


def add_weight_grad(out: Tensor, dlogits: Tensor, hidden: Tensor, *, first: bool, alpha: float) -> None:
    """out [v, D] (+)= alpha dlogits [m, v].T @ hidden [m, D]."""
    for part in _parts(dlogits):
        add_product(out[part], dlogits[:, part].T, hidden, first=first, alpha=alpha)


def _parts(dlogits: Tensor) -> list[slice]:
    """The whole, except where 16-bit operands are cast to float32 first: then a bounded piece at a time."""
    v = dlogits.shape[1]
    if dlogits.is_cuda or dlogits.dtype == torch.float32:
        return [slice(0, v)]
    return [slice(i, min(v, i + _CPU_SLAB)) for i in range(0, v, _CPU_SLAB)]


def cast_bytes(depth: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int]:
    """What the products hold beyond their operands and results: bytes in all, and bytes per row."""
    if device.type == "cuda" or dtype == torch.float32:
        return 0, 0
    return 4 * _CPU_SLAB * depth, 4 * (depth + _CPU_SLAB)
