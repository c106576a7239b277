"""The three calls of `backend.Backend`: how chunks of rows and slabs of the vocabulary are walked.

stats            per chunk of rows: GEMM 1 without storing, row kernel
fused_loss       per chunk of rows: GEMM 1 storing exponentials, row kernel with the losses, exponentials -> dlogits
                 in place, dH, dW: three GEMMs, 6F
stats_backward   per slab of the vocabulary: GEMM 1 again storing dlogits, dH, dW: with `stats` four GEMMs, 8F
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from operator import itemgetter

import torch
from torch import Tensor

from ..backend import Grads, LinearHead, Needs, Options, RowStats
from ..token_losses import LossSpec, TokenLosses, TokenRows
from .launch import Kernels, TileStats
from .plan import chunk_rows, chunks, slab_size
from .products import Slab, add_hidden_grad, add_weight_grad, padded


class _Accumulator:
    """dH, dW and db of a call. dW and db are float32; dH has hidden's type and is added up in float32."""

    def __init__(self, kernels: Kernels, needs: Needs, *, n_grad: int):
        n, device = kernels.head.n, kernels.device
        make = torch.empty if n_grad else torch.zeros
        self.hidden = make(n, kernels.depth, dtype=kernels.dtype, device=device) if needs.hidden else None
        if self.hidden is not None:
            self.hidden[n_grad:] = 0
        self.weight = make(kernels.vocab, kernels.depth, device=device) if needs.weight else None
        self.bias = torch.zeros(kernels.vocab, device=device) if needs.bias else None
        self.direct = kernels.dtype == torch.float32
        self.alpha = 1.0 / kernels.grad_scale

    def begin(self, part: slice) -> None:
        """The chunk of rows that the next `add` calls are about."""
        self.part = part
        self.partial: Tensor | None = None
        if self.hidden is not None:
            out = self.hidden[part]
            self.partial = out if self.direct else torch.empty(out.shape, device=out.device)

    def add(self, dlogits: Tensor, hidden: Tensor, slab: Slab) -> None:
        """dlogits [rows of the chunk, entries of the slab]."""
        if self.partial is not None:
            add_hidden_grad(self.partial, dlogits, slab.weight, first=slab.start == 0, alpha=self.alpha)
        if self.weight is not None:
            out = self.weight[slab.start : slab.stop]
            add_weight_grad(out, dlogits, hidden, first=self.part.start == 0, alpha=self.alpha)
        if self.bias is not None:
            total = dlogits.sum(0, dtype=torch.float32)
            self.bias[slab.start : slab.stop].add_(total, alpha=self.alpha)

    def end(self) -> None:
        if self.hidden is not None and not self.direct:
            assert self.partial is not None
            if self.hidden.dtype == torch.float16:  # as the gradients of the logits, see elementary.to_storage
                self.partial.clamp_(-65504.0, 65504.0)
            self.hidden[self.part] = self.partial

    def grads(self) -> Grads:
        return Grads(self.hidden, self.weight, self.bias)


class TritonBackend:
    """See `backend.Backend`."""

    def stats(self, head: LinearHead, *, with_entropy: bool, options: Options) -> RowStats:
        with _on(head):
            kernels = Kernels(head)
            out = _empty_stats(kernels, with_entropy)
            for part, tiles in _statistics(kernels, options.budget, 0, head.n, with_entropy):
                kernels.statistics(tiles, RowStats(*_take(out, part)))
            return out

    def fused_loss(
        self,
        head: LinearHead,
        rows: TokenRows,
        spec: LossSpec,
        *,
        scale: Tensor,
        n_grad: int,
        with_entropy: bool,
        needs: Needs,
        options: Options,
    ) -> tuple[RowStats, TokenLosses, Grads]:
        with _on(head):
            kernels = Kernels(head)
            n, device = head.n, kernels.device
            rows = rows.map(Tensor.contiguous)
            stats, losses = _empty_stats(kernels, with_entropy), _empty_losses(rows, n, device)
            _losses_only(kernels, rows, spec, scale, stats, losses, budget=options.budget, start=n_grad)
            grads = _Accumulator(kernels, needs, n_grad=n_grad)
            step, size = _fused_plan(kernels, needs, options.budget, n_grad, with_entropy)
            parts = chunks(0, n_grad, step)
            if parts:
                workspace = kernels.workspace(step, kernels.vocab)
                tiles = kernels.tile_stats(step, with_entropy)
                own_grad, other_grad = torch.empty(2, step, device=device).unbind()
            for part in parts:
                m = part.stop - part.start
                hidden, target = kernels.hidden(part), kernels.target[part]
                for slab in kernels.slabs(size):
                    kernels.forward(hidden, slab, target, tiles, workspace[:m])
                chunk = RowStats(*_take(stats, part))
                kernels.losses(
                    tiles, chunk, rows.map(itemgetter(part)), spec, scale * kernels.grad_scale,
                    TokenLosses(*_take(losses, part)), own_grad[:m], other_grad[:m],
                )  # fmt: skip
                dlogits = kernels.dlogits(
                    workspace, tiles, target, chunk.logprob, chunk.logsumexp, own_grad[:m], other_grad[:m]
                )
                grads.begin(part)
                for slab in kernels.slabs(size):
                    grads.add(dlogits[:, slab.start : slab.stop], hidden, slab)
                grads.end()
                del hidden  # it may be a copy, and the next chunk's is made before the name is bound again
            return stats, losses, grads.grads()

    def stats_backward(
        self,
        head: LinearHead,
        stats: RowStats,
        grad_logprob: Tensor,
        grad_logsumexp: Tensor | None,
        grad_entropy: Tensor | None,
        *,
        needs: Needs,
        options: Options,
    ) -> Grads:
        with _on(head), torch.no_grad():
            kernels = Kernels(head)
            n = head.n
            own, other, tilt = _upstream(stats, grad_logprob, grad_logsumexp, grad_entropy, kernels.grad_scale)
            step, size = _backward_plan(kernels, needs, options.budget)
            grads = _Accumulator(kernels, needs, n_grad=n)
            workspace = kernels.workspace(step, size)
            for part in chunks(0, n, step):
                hidden, target = kernels.hidden(part), kernels.target[part]
                entropy, chunk_tilt = _take((None if tilt is None else stats.entropy, tilt), part)
                grads.begin(part)
                for slab in kernels.slabs(size):
                    dlogits = kernels.backward(
                        hidden,
                        slab,
                        target,
                        workspace,
                        stats.logsumexp[part],
                        entropy,
                        own[part],
                        other[part],
                        chunk_tilt,
                    )
                    grads.add(dlogits, hidden, slab)
                grads.end()
                del hidden  # as in fused_loss
            return grads.grads()


def _on(head: LinearHead) -> AbstractContextManager:
    """Triton launches on the current device; make it the tensors' own."""
    return torch.cuda.device_of(head.hidden)


def _take(vectors: tuple[Tensor | None, ...], part: slice) -> list:
    return [None if x is None else x[part] for x in vectors]


def _empty_stats(kernels: Kernels, with_entropy: bool) -> RowStats:
    logprob, logsumexp, *entropy = torch.empty(2 + with_entropy, kernels.head.n, device=kernels.device).unbind()
    return RowStats(logprob, logsumexp, entropy[0] if entropy else None)


def _empty_losses(rows: TokenRows, n: int, device: torch.device) -> TokenLosses:
    has_kl = rows.advantage is not None and rows.ref_logprob is not None
    loss, dloss, ratio, support, *kl = torch.empty(4 + has_kl, n, device=device).unbind()
    clipped = torch.empty(n, dtype=torch.bool, device=device)
    return TokenLosses(loss, dloss, ratio, clipped, support, kl[0] if kl else None)


def _losses_only(
    kernels: Kernels, rows: TokenRows, spec: LossSpec, scale: Tensor, stats: RowStats, losses: TokenLosses,
    *, budget: int, start: int,
) -> None:  # fmt: skip
    """Statistics and losses of the rows from `start` on, which have no gradient. A function of its own, called first,
    so that its temporaries are gone before those of the rows with one are made."""
    for part, tiles in _statistics(kernels, budget, start, kernels.head.n, stats.entropy is not None):
        unused = torch.empty(2, part.stop - part.start, device=kernels.device)
        kernels.losses(
            tiles, RowStats(*_take(stats, part)), rows.map(itemgetter(part)), spec, scale,
            TokenLosses(*_take(losses, part)), *unused,
        )  # fmt: skip


def _statistics(
    kernels: Kernels, budget: int, start: int, stop: int, with_entropy: bool
) -> Iterator[tuple[slice, TileStats]]:
    """GEMM 1 without gradients for the rows [start, stop), chunk by chunk; the next chunk overwrites the statistics."""
    if start == stop:
        return
    size, slab_bytes = kernels.slab_plan(budget // 4)
    step = chunk_rows(
        stop - start, budget - slab_bytes, kernels.row_bytes(with_entropy),
        depth=kernels.depth, multiprocessors=kernels.programs,
    )  # fmt: skip
    tiles = kernels.tile_stats(step, with_entropy)
    for part in chunks(start, stop, step):
        hidden, target = kernels.hidden(part), kernels.target[part]
        for slab in kernels.slabs(size):
            kernels.forward(hidden, slab, target, tiles, None)
        del hidden  # as in fused_loss
        yield part, tiles


def _upstream(
    stats: RowStats, grad_logprob: Tensor, grad_logsumexp: Tensor | None, grad_entropy: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """d loss / d z at the target, and for the other entries the factors of p_j and of -p_j (log p_j + H)."""
    own = -torch.expm1(stats.logprob) * grad_logprob
    other = -grad_logprob
    p = stats.logprob.exp()
    if grad_logsumexp is not None:
        own += p * grad_logsumexp
        other = other + grad_logsumexp
    if grad_entropy is not None:
        own -= p * grad_entropy * (stats.logprob.clamp(min=-1000.0) + stats.entropy)
        grad_entropy = (grad_entropy * scale).contiguous()
    return own.mul_(scale).contiguous(), other.mul_(scale).contiguous(), grad_entropy


def _fused_plan(kernels: Kernels, needs: Needs, budget: int, n_grad: int, with_entropy: bool) -> tuple[int, int]:
    """(rows per chunk, vocabulary entries per slab): a chunk holds its whole [rows, V] of exponentials."""
    size, slab_bytes = kernels.slab_plan(budget // 4)
    itemsize = kernels.storage.itemsize
    per_row = (
        kernels.row_bytes(with_entropy) + padded(kernels.vocab, itemsize) * itemsize + kernels.partial_bytes(needs)
    )
    left = budget - slab_bytes - kernels.cast_bytes - 4 * size * needs.bias
    return chunk_rows(n_grad, left, per_row, depth=kernels.depth, multiprocessors=kernels.programs), size


def _backward_plan(kernels: Kernels, needs: Needs, budget: int) -> tuple[int, int]:
    """(rows per chunk, vocabulary entries per slab): all rows at once where they fit, so that dW is written once."""
    itemsize = kernels.storage.itemsize
    per_row = kernels.row_bytes(False) + kernels.partial_bytes(needs)
    per_entry = (0 if kernels.weight_ready else kernels.weight_row_bytes) + 4 * needs.bias
    budget -= kernels.cast_bytes
    n = kernels.head.n
    spare = budget // 2 - per_entry * kernels.width
    rows = chunk_rows(
        n, spare, per_row + kernels.width * itemsize, depth=kernels.depth, multiprocessors=kernels.programs
    )
    left = budget - rows * per_row
    return rows, slab_size(kernels.vocab, left, rows * itemsize + per_entry, kernels.width)
