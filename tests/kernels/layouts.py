"""Tensors that do not lie dense and aligned in memory, and their copies on another device."""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = ("transposed", "sliced", "strided", "unaligned", "expanded")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The matrix x: transposed, sliced [:, :-1], every second column, at a base pointer that is not 16-byte aligned;
    or its first row, expanded.
    """
    if layout == "transposed":
        return x.T.contiguous().T
    if layout == "sliced":
        return torch.cat([x, x[:, :1]], 1)[:, :-1]
    if layout == "strided":
        return torch.stack([x, x * 0 + 9], 2).flatten(1)[:, ::2]
    if layout == "unaligned":
        y = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
        assert y.data_ptr() % 16
        return y.copy_(x)
    return x[:1].expand(x.shape)


def every_second(x: Tensor) -> Tensor:
    """The vector x with a stride of 2, another entry of its own after each."""
    return torch.stack([x, x.roll(1)], 1)[:, 0]


def on_device(x: Tensor, device: str) -> Tensor:
    """x on another device with its own strides and offset: of every layout above `x.to` makes a dense one."""
    if x.numel() == 0:
        return x.to(device)
    end = x.storage_offset() + 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.as_strided((end,), (1,), 0).to(device).as_strided(x.shape, x.stride(), x.storage_offset())
