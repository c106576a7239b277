"""The `chunked` backend: plain torch, any device, a bounded workspace.

Rows are taken in chunks whose logits fit the byte budget. A chunk's logits become its gradient in one buffer, in place:
logits -> exponentials e = exp(z - max) -> the target's e replaced by minus the sum R of the others. With S = R + e_t,
dlogp/dz = -(that buffer) / S, so 1 - p_t = R / S never comes from a cancellation, however close p_t is to 1. The factor
-dloss/dlogp / S is one number per row and is applied to the [n, D] side of the products, not to the [n, V] buffer.

On a CPU the elementwise passes run over a few rows at a time, so that they find them in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from .backend import Grads, LinearHead, Needs, Options, RowStats
from .token_losses import LossSpec, TokenLosses, TokenRows, token_losses

CPU_WORKSPACE = 176 << 20  # more rows at a time make the products no faster on a CPU
CPU_BLOCK, GPU_BLOCK = 512 << 10, 64 << 20  # bytes of logits in one elementwise pass; on a CPU per thread: its cache
LOWEST = -200.0  # exp(LOWEST) is 0 in float32: stands for -inf where 0 * -inf would be NaN


class _Workspace:
    """How a call is cut up, and its one [rows, V] buffer."""

    def __init__(self, head: LinearHead, options: Options, *, backward: bool):
        n, d = head.n, head.weight.shape[1]
        v = head.weight.shape[0]
        cpu = head.hidden.device.type == "cpu"
        budget = min(options.budget, CPU_WORKSPACE) if cpu else options.budget
        threads = torch.get_num_threads() if cpu else 1
        self.block = threads * max(1, (CPU_BLOCK if cpu else GPU_BLOCK) // (4 * v))
        self.block = max(1, min(self.block, budget // (8 * 4 * v)))
        budget -= 4 * v * self.block
        # CUDA multiplies 16-bit inputs into float32; elsewhere they are cast to float32, slab by slab.
        self.native = head.hidden.dtype != torch.float32 and _multiplies_into_float32(head.hidden.device)
        self.compute = head.hidden.dtype if self.native else torch.float32
        # A weight in hidden's own type is used as it stands if that is also the products' type.
        recast = not (head.weight.dtype == head.hidden.dtype == self.compute and _blas_ready(head.weight))
        self.slab, self.copy = v, None
        if recast:
            slab_row = d * (self.compute.itemsize + head.hidden.dtype.itemsize)
            self.slab = min(v, max(1, budget // 4 // slab_row))
            self.copy = torch.empty(self.slab, d, dtype=self.compute, device=head.hidden.device)
            budget -= self.slab * slab_row
        row = 4 * v + 12 * d
        if backward:
            row += 4 * v * (head.softcap is not None) + 2 * v * self.native
        self.rows = max(1, min(n, budget // row))
        if self.rows >= 32:
            self.rows -= self.rows % 16
        self.rows = -(-n // -(-n // self.rows))  # chunks are equal: no buffer larger than they are
        self.head = head
        self.buffer = torch.empty(self.rows, v, device=head.hidden.device)
        self.slope = torch.empty_like(self.buffer) if backward and head.softcap is not None else None

    def chunks(self, start: int, stop: int) -> Iterator[slice]:
        """Equal chunks of at most `rows` rows."""
        count = -(-(stop - start) // self.rows)
        for i in range(count):
            yield slice(start + (stop - start) * i // count, start + (stop - start) * (i + 1) // count)

    def blocks(self, n: int) -> Iterator[slice]:
        for start in range(0, n, self.block):
            yield slice(start, min(n, start + self.block))

    def weight_slabs(self) -> Iterator[tuple[slice, Tensor]]:
        """(entries, weight) for slabs of the vocabulary; copies go to one buffer, so one lives until the next."""
        weight = self.head.weight
        if self.copy is None:
            yield slice(None), weight
            return
        for start in range(0, weight.shape[0], self.slab):
            part = slice(start, min(weight.shape[0], start + self.slab))
            # Through hidden's type: under autocast the weight is rounded as F.linear would round it.
            yield part, self.copy[: part.stop - start].copy_(weight[part].to(self.head.hidden.dtype))

    def hidden(self, part: slice) -> Tensor:
        rows = self.head.rows(part).to(self.compute)
        return rows if _blas_ready(rows) else rows.contiguous()

    def products(self, hidden: Tensor) -> Tensor:
        """hidden @ weight.T, float32, in the buffer."""
        z = self.buffer[: hidden.shape[0]]
        for part, weight in self.weight_slabs():
            _mm(hidden, weight.T, z[:, part], self.native)
        return z

    def finish_logits(self, z: Tensor, rows: slice) -> Tensor:
        """Bias, softcap and temperature on a block of rows, in place; keeps dz/d(product) where it is not constant."""
        head = self.head
        if head.bias is not None:
            z += head.bias
        if head.softcap is not None:
            z.div_(head.softcap).tanh_()
            if self.slope is not None:
                torch.mul(z, z, out=self.slope[rows]).neg_().add_(1.0)
            z.mul_(head.softcap)
        return z if head.temperature == 1.0 else z.div_(head.temperature)


class _Exponentials(NamedTuple):
    """Of a chunk: e [c, V] with the target's e set to 0; total = S; rest = R; the rows' statistics."""

    e: Tensor
    total: Tensor
    rest: Tensor
    stats: RowStats


class _Accumulator:
    """dH, dW and db of a call, chunk by chunk; dW and db in float32."""

    def __init__(self, work: _Workspace, needs: Needs):
        self.work = work
        head = work.head
        n, d = head.n, head.weight.shape[1]
        v = head.weight.shape[0]
        device = head.hidden.device
        self.hidden = torch.zeros(n, d, dtype=head.hidden.dtype, device=device) if needs.hidden else None
        self.weight = torch.empty(v, d, device=device) if needs.weight else None
        self.bias = torch.zeros(v, device=device) if needs.bias else None
        self.first = True

    def add(self, part: slice, hidden: Tensor, dz: Tensor, factor: Tensor) -> None:
        """dz [c, V] (its slope and temperature not yet applied) times factor [c], both used up."""
        work = self.work
        if work.slope is not None:
            dz *= work.slope[: dz.shape[0]]
        factor = (factor / work.head.temperature)[:, None]
        if work.native:
            dz, factor = _saturate(dz.mul_(factor), work.compute).to(work.compute), None
        if self.bias is not None:
            self.bias += dz.sum(0, dtype=torch.float32) if factor is None else torch.mv(dz.T, factor[:, 0])
        if self.hidden is not None:
            self._add_hidden(self.hidden[part], dz, factor)
        if self.weight is not None:
            scaled = hidden if factor is None else hidden * factor
            _mm(dz.T, scaled, self.weight, work.native, accumulate=not self.first)
        self.first = False

    def _add_hidden(self, out: Tensor, dz: Tensor, factor: Tensor | None) -> None:
        direct = out.dtype == torch.float32
        total = out if direct else torch.empty(out.shape, device=out.device)
        for i, (part, weight) in enumerate(self.work.weight_slabs()):
            _mm(dz[:, part], weight, total, self.work.native, accumulate=i > 0)
        if factor is not None:
            total *= factor
        if not direct:
            out.copy_(_saturate(total, out.dtype))

    def grads(self) -> Grads:
        return Grads(self.hidden, self.weight, self.bias)


class ChunkedBackend:
    """See `backend.Backend`."""

    def stats(self, head: LinearHead, *, with_entropy: bool, options: Options) -> RowStats:
        work = _Workspace(head, options, backward=False)
        parts = [_exponentials(work, part, work.hidden(part), with_entropy).stats for part in work.chunks(0, head.n)]
        return _join(parts)

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
        work = _Workspace(head, options, backward=True)
        out = _Accumulator(work, needs)
        # dz = p (g_logsumexp - g_H (log p + H) - g_logprob), and g_logprob more at the target.
        constant = torch.zeros_like(grad_logprob) if grad_logsumexp is None else grad_logsumexp
        slope = None
        if grad_entropy is not None:
            assert stats.entropy is not None
            constant, slope = constant - grad_entropy * stats.entropy, -grad_entropy
        # There 1 - p_t comes from the log-prob: p_t - 1 would cancel.
        others = constant if slope is None else constant + slope * stats.logprob.clamp(min=LOWEST)
        at_target = -torch.expm1(stats.logprob) * grad_logprob + stats.logprob.exp() * others
        constant = constant - grad_logprob
        for part in work.chunks(0, head.n):
            hidden = work.hidden(part)
            dz = work.products(hidden)
            for block in work.blocks(dz.shape[0]):
                rows = slice(part.start + block.start, part.start + block.stop)
                log_p = work.finish_logits(dz[block], block).sub_(stats.logsumexp[rows, None])
                if slope is None:
                    log_p.exp_().mul_(constant[rows, None])
                else:
                    p = log_p.clamp_(min=LOWEST).exp()
                    log_p.mul_(slope[rows, None]).add_(constant[rows, None]).mul_(p)
                log_p.scatter_(1, head.target[rows, None], at_target[rows, None])
            out.add(part, hidden, dz, torch.ones_like(grad_logprob[part]))
        return out.grads()

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
        work = _Workspace(head, options, backward=n_grad > 0)
        out = _Accumulator(work, needs)
        stats, losses = [], []
        for part in (*work.chunks(0, n_grad), *work.chunks(n_grad, head.n)):
            hidden = work.hidden(part)
            chunk = _exponentials(work, part, hidden, with_entropy)
            stats.append(chunk.stats)
            losses.append(token_losses(chunk.stats.logprob, rows.map(itemgetter(part)), spec))
            if part.start < n_grad:
                dz = chunk.e.scatter_(1, head.target[part, None], -chunk.rest[:, None])
                coefficient = scale * rows.token_weight[part] * losses[-1].dloss
                out.add(part, hidden, dz, -coefficient / chunk.total)
        return _join(stats), _join(losses), out.grads()


def _exponentials(work: _Workspace, part: slice, hidden: Tensor, with_entropy: bool) -> _Exponentials:
    z = work.products(hidden)
    target = work.head.target[part, None]
    n = z.shape[0]
    top, at_target, rest, weighted = (z.new_empty(n, 1) for _ in range(4))
    for block in work.blocks(n):
        e = work.finish_logits(z[block], block)
        torch.amax(e, 1, keepdim=True, out=top[block])
        e.sub_(top[block])
        torch.gather(e, 1, target[block], out=at_target[block])
        if with_entropy:
            shifted = e.clamp(min=LOWEST)
            torch.sum(shifted.mul_(e.exp_()), 1, keepdim=True, out=weighted[block])
        else:
            e.exp_()
        e.scatter_(1, target[block], 0.0)
        torch.sum(e, 1, keepdim=True, out=rest[block])
    top, at_target, rest, weighted = (x.squeeze(1) for x in (top, at_target, rest, weighted))
    total = rest + at_target.exp()
    # Where the target is the largest, S = 1 + R: log1p keeps log-probs near 0 exact.
    log_total = torch.where(at_target == 0, torch.log1p(rest), total.log())
    entropy = log_total - weighted / total if with_entropy else None
    return _Exponentials(z, total, rest, RowStats(at_target - log_total, top + log_total, entropy))


def _saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 x, in place, held within float16's range if that is `dtype`: an infinity would make NaN of every gradient
    that the products add it to."""
    return x.clamp_(-65504.0, 65504.0) if dtype == torch.float16 else x


def _join(parts):
    """One NamedTuple of tensors [n] from one per chunk."""
    if len(parts) == 1:
        return parts[0]
    return type(parts[0])(*(None if column[0] is None else torch.cat(column) for column in zip(*parts)))


def _mm(a: Tensor, b: Tensor, out: Tensor, native: bool, *, accumulate: bool = False) -> None:
    """out (+)= a @ b, in float32. `native`: 16-bit inputs on CUDA."""
    dtype = {"out_dtype": torch.float32} if native else {}
    if accumulate:
        torch.addmm(out, a, b, out=out, **dtype)
    else:
        torch.mm(a, b, out=out, **dtype)


def _multiplies_into_float32(device: torch.device) -> bool:
    return device.type == "cuda"


def _blas_ready(x: Tensor) -> bool:
    """A matrix that the products read as it stands, without a copy of their own."""
    rows, columns = x.stride()
    return (columns == 1 and rows >= x.shape[1]) or (rows == 1 and columns >= x.shape[0])


backend = ChunkedBackend()
