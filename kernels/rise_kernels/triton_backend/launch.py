"""One head on one device, and the kernels' launches on a chunk of its rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..backend import LinearHead, Needs
from ..token_losses import LossSpec, TokenLosses, TokenRows
from .logits import backward_kernel, forward_kernel
from .plan import slab_size
from .products import Slab, aligned, cast_bytes, is_ready, padded, ready
from .rows import dlogits_kernel, loss_kernel, statistics_kernel
from .tiles import architecture, has_descriptors, programs, stat_width

_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
BLOCK_ROWS, BLOCK_TILES = 32, 64
_ROW_VECTORS = 64  # bytes per row for the vectors between the kernels
FP16_RANGE = 15  # exponentials up to 2^15: in float16 they keep 11 bits down to 2^-29 of the largest in their tile
FP16_GRADS = 2.0**8  # float16 gradients of the logits are held this much larger, so that small probabilities survive


class TileStats(NamedTuple):
    """Per (tile, row) statistics, float32 [tiles, rows] (slope None without entropy), and the target's logit [rows]."""

    offset: Tensor
    total: Tensor
    slope: Tensor | None
    target_logit: Tensor


class Kernels:
    """What every launch for a head has in common. `dtype` is the type of the products' operands and of dlogits."""

    def __init__(self, head: LinearHead):
        self.head = head
        self.device = head.hidden.device
        self.dtype = head.hidden.dtype
        self.storage = torch.float32 if self.dtype == torch.float32 else torch.float16
        self.vocab, self.depth = head.weight.shape
        self.width = stat_width(self.device, self.dtype.itemsize)
        self.tiles = triton.cdiv(self.vocab, self.width)
        self.bias = None if head.bias is None else head.bias.contiguous()
        self.target = head.target.contiguous()
        self.weight_ready = is_ready(head.weight, self.dtype)
        self.hidden_ready = head.order is None and is_ready(head.hidden, self.dtype)
        self._slab: Tensor | None = None
        self.descriptors = has_descriptors(self.device)
        self.programs = programs(self.device)
        self.grad_scale = FP16_GRADS if self.dtype == torch.float16 else 1.0
        self.weight_row_bytes = padded(self.depth, self.dtype.itemsize) * self.dtype.itemsize
        self.cast_bytes, self._cast_row_bytes = cast_bytes(self.depth, self.dtype, self.device)

    def slabs(self, size: int) -> Iterator[Slab]:
        """The weight by `size` vocabulary entries; one that the kernels cannot read (another type under autocast,
        strides, alignment) a copy at a time, in one buffer: a slab is gone when the next is asked for."""
        weight = self.head.weight
        if not self.weight_ready and self._slab is None:
            self._slab = aligned(size, self.depth, self.dtype, self.device)
        for start in range(0, self.vocab, size):
            part = weight[start : start + size]
            if self._slab is not None:
                part = self._slab[: part.shape[0]].copy_(part)
            yield Slab(start, start + part.shape[0], part)

    def slab_plan(self, budget: int) -> tuple[int, int]:
        """Vocabulary entries per slab, and the bytes of its copy; (all, 0) where the weight is read in place."""
        if self.weight_ready:
            return self.vocab, 0
        size = slab_size(self.vocab, budget, self.weight_row_bytes, self.width)
        return size, size * self.weight_row_bytes

    def row_bytes(self, with_entropy: bool) -> int:
        """What a row of a chunk holds: statistics, vectors, and copies of its hidden state."""
        copy = 0 if self.hidden_ready else self.weight_row_bytes
        return 4 * self.tiles * (2 + with_entropy) + _ROW_VECTORS + copy + self._cast_row_bytes

    def partial_bytes(self, needs: Needs) -> int:
        """What a row of a chunk holds of dH in float32, before it is rounded to a 16-bit type."""
        return 4 * self.depth if needs.hidden and self.dtype != torch.float32 else 0

    def hidden(self, part: slice) -> Tensor:
        head = self.head
        if head.order is None:
            return ready(head.hidden[part], self.dtype)
        copy = aligned(part.stop - part.start, self.depth, self.dtype, self.device)
        return torch.index_select(head.hidden, 0, head.order[part], out=copy)

    def workspace(self, rows: int, columns: int) -> Tensor:
        """[rows, columns] of 16-bit or float32 storage. The padding aligns rows, and takes what a descriptor writes
        beyond the last column: it stores 16 bytes at a time."""
        return torch.empty(rows, padded(columns, self.storage.itemsize), dtype=self.storage, device=self.device)

    def tile_stats(self, rows: int, with_entropy: bool) -> TileStats:
        offset, total, *slope = torch.empty(2 + with_entropy, self.tiles * rows, device=self.device).unbind()
        return TileStats(offset, total, slope[0] if slope else None, torch.empty(rows, device=self.device))

    def forward(self, hidden: Tensor, slab: Slab, target: Tensor, stats: TileStats, workspace: Tensor | None) -> None:
        """Statistics of one slab's tiles and, into workspace[:, slab], the exponentials."""
        columns = None if workspace is None else workspace[:, slab.start : slab.stop]
        forward_kernel[self._grid(hidden, slab)](
            *self._operands(hidden, slab.weight),
            self.bias, target, self._matrix(columns), *stats,
            *self._sizes(hidden, slab, columns),
            STORE=columns is not None, WITH_ENTROPY=stats.slope is not None,
            EXTRA_BITS=FP16_RANGE if self.storage == torch.float16 else 0,
            **self._common(),
        )  # fmt: skip

    def backward(
        self, hidden: Tensor, slab: Slab, target: Tensor, workspace: Tensor,
        logsumexp: Tensor, entropy: Tensor | None, own_grad: Tensor, other_grad: Tensor, grad_entropy: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """d loss / d (h.w + b) of one slab, [rows, slab] in `dtype`, in the workspace."""
        columns = workspace[: hidden.shape[0], : slab.stop - slab.start]
        backward_kernel[self._grid(hidden, slab)](
            *self._operands(hidden, slab.weight),
            self.bias, target, self._matrix(columns), logsumexp, entropy, own_grad, other_grad, grad_entropy,
            *self._sizes(hidden, slab, columns),
            HAS_TILT=grad_entropy is not None, GRAD_DTYPE=_TL[self.dtype],
            **self._common(),
        )  # fmt: skip
        return columns.view(self.dtype)

    def statistics(self, stats: TileStats, out: tuple[Tensor, Tensor, Tensor | None]) -> None:
        """Into logprob, logsumexp, entropy, float32 [rows]."""
        n = out[0].shape[0]
        statistics_kernel[(triton.cdiv(n, BLOCK_ROWS),)](
            stats.offset, stats.total, stats.slope, stats.target_logit, *out, n, self.tiles,
            WITH_ENTROPY=stats.slope is not None, BLOCK_ROWS=BLOCK_ROWS, BLOCK_TILES=BLOCK_TILES,
        )  # fmt: skip

    def losses(
        self, stats: TileStats, out: tuple[Tensor, Tensor, Tensor | None], rows: TokenRows, spec: LossSpec,
        scale: Tensor, losses: TokenLosses, own_grad: Tensor, other_grad: Tensor,
    ) -> None:  # fmt: skip
        """`statistics`, and into `losses` and the two gradients (see `rows.loss_kernel`)."""
        n = out[0].shape[0]
        loss_kernel[(triton.cdiv(n, BLOCK_ROWS),)](
            stats.offset, stats.total, stats.slope, stats.target_logit, *out, n, self.tiles,
            rows.token_weight, rows.is_guide.view(torch.int8),
            rows.advantage, rows.old_logprob, rows.ref_logprob, rows.behaviour_logprob, scale,
            losses.loss, losses.dloss, losses.ratio, losses.clipped.view(torch.int8), losses.support, losses.kl,
            own_grad, other_grad,
            **loss_scalars(spec),
            HAS_POLICY=rows.advantage is not None, HAS_OLD=rows.old_logprob is not None,
            HAS_REF=rows.ref_logprob is not None, HAS_BEHAVIOUR=rows.behaviour_logprob is not None,
            HAS_DUAL=spec.dual_clip is not None, HAS_CAP=spec.is_cap is not None, HAS_KL=spec.kl_coef != 0,
            KL_ESTIMATOR=spec.kl_estimator, GUIDE=spec.guide,
            WITH_ENTROPY=stats.slope is not None, BLOCK_ROWS=BLOCK_ROWS, BLOCK_TILES=BLOCK_TILES,
        )  # fmt: skip

    def dlogits(
        self, workspace: Tensor, stats: TileStats, target: Tensor, logprob: Tensor, logsumexp: Tensor,
        own_grad: Tensor, other_grad: Tensor,
    ) -> Tensor:  # fmt: skip
        """Exponentials to d loss / d (h.w + b), in place: [rows, V] in `dtype`."""
        n = logprob.shape[0]
        dlogits_kernel[(self.tiles, triton.cdiv(n, BLOCK_ROWS))](
            workspace, workspace.stride(0), stats.offset, target, logprob, logsumexp, own_grad, other_grad,
            n, self.vocab, float(self.head.temperature), float(self.head.softcap or 0.0),
            HAS_SOFTCAP=self.head.softcap is not None, GRAD_DTYPE=_TL[self.dtype],
            BLOCK_ROWS=BLOCK_ROWS, BLOCK_N=self.width, num_warps=8,
        )  # fmt: skip
        return workspace.view(self.dtype)[:n, : self.vocab]

    def _grid(self, hidden: Tensor, slab: Slab) -> Any:
        m, n = hidden.shape[0], slab.stop - slab.start
        return lambda meta: (min(self.programs, triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"])),)

    def _matrix(self, x: Tensor | None) -> Any:
        """A descriptor where the kernel wants one (its block shape is set at launch), else the pointer."""
        if x is None or not self.descriptors:
            return x
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1])

    def _operands(self, hidden: Tensor, weight: Tensor) -> tuple[Any, Any]:
        return self._matrix(hidden), self._matrix(weight)

    def _sizes(self, hidden: Tensor, slab: Slab, columns: Tensor | None) -> tuple:
        head = self.head
        return (
            hidden.shape[0], slab.stop - slab.start, slab.start, self.vocab, self.depth,
            hidden.stride(0), slab.weight.stride(0), 0 if columns is None else columns.stride(0),
            float(head.softcap or 0.0), 1.0 / head.temperature,
        )  # fmt: skip

    def _common(self) -> dict[str, Any]:
        return {
            "HAS_BIAS": self.bias is not None,
            "HAS_SOFTCAP": self.head.softcap is not None,
            "STORAGE": _TL[self.storage],
            "DESCRIPTORS": self.descriptors,
            "ARCHITECTURE": architecture(self.device),
        }


def loss_scalars(spec: LossSpec) -> dict[str, float]:
    """The row kernel's scalars, each formed in double precision as `token_losses` forms it."""
    return {
        "log_gamma": math.log(spec.gamma),
        "ratio_low": 1 - spec.clip_low,
        "ratio_high": 1 + spec.clip_high,
        "dual_clip": spec.dual_clip or 0.0,
        "kl_coef": spec.kl_coef,
        "is_cap": spec.is_cap or 0.0,
    }
