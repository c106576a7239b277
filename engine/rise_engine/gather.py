"""Picking rows so that the gradients of a row that is used many times add up in float32.

torch adds them in the gradient's own type. A prompt's keys and values are used by each of its responses, a frequent
token's embedding by every place it stands at: in bfloat16 a contribution below 1/512 of the sum so far vanishes, always
downwards, so this is a bias and not noise. (With 51 sequences of one prompt in a micro-batch, one of them 500 times as
heavy as each other, the embedding's gradient was 3.5 % short and its norm over all weights 0.9 %.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = source.shape
        return source.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        total = gradient.new_zeros(ctx.shape, dtype=torch.float32)
        return total.index_add_(0, index, gradient.float()).to(gradient.dtype), None


class _EmbedRows(_GatherRows):
    """The same where the source has far more rows than are picked: no float32 buffer of its size."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        ordered, order = index.sort()
        group = torch.zeros_like(ordered)
        group[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
        total = torch.zeros_like(gradient, dtype=torch.float32)
        total.index_add_(0, group, gradient.index_select(0, order).float())
        # Groups are fewer than rows: the rest adds zeros to row 0, which needs no count on the host.
        row = torch.zeros_like(ordered).scatter_(0, group, ordered)
        return gradient.new_zeros(ctx.shape).index_add_(0, row, total.to(gradient.dtype)), None


def gather_rows(source: Tensor, index: Tensor) -> Tensor:
    """source [T, ...], index int64 [n] -> [n, ...]: `index_select`, its gradient rounded once."""
    return _GatherRows.apply(source, index) if source.dtype.itemsize < 4 else source.index_select(0, index)


class Embedding(nn.Embedding):
    """Owns the Parameter of the `nn.Embedding` it replaces, tied to the head or not; its gradient is rounded once."""

    def __init__(self, plain: nn.Embedding) -> None:
        super().__init__(plain.num_embeddings, plain.embedding_dim, plain.padding_idx, _weight=plain.weight.detach())
        self.weight = plain.weight

    def forward(self, input: Tensor) -> Tensor:
        if self.weight.dtype.itemsize >= 4:
            return super().forward(input)
        found = _EmbedRows.apply(self.weight, input.flatten()).unflatten(0, input.shape)
        if self.padding_idx is None:
            return found
        # As in nn.Embedding, the padding token is not trained.
        return torch.where((input == self.padding_idx)[..., None], found.detach(), found)


def install_embedding(model: PreTrainedModel) -> None:
    """Replaces a plain token embedding in place; one of another kind (scaled, quantized) is left alone."""
    plain = model.get_input_embeddings()
    if type(plain) is nn.Embedding and not plain.scale_grad_by_freq and plain.max_norm is None and not plain.sparse:
        model.set_input_embeddings(Embedding(plain))
