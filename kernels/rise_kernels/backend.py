"""What a backend must provide, and the plain records that cross that line.

The public functions (`api.py`) validate, drop the rows that cannot matter and wrap autograd once for all backends. A
backend sees only rows that matter, already ordered: the first `n_grad` rows need gradients, the rest only statistics.

One GEMM costs 2F FLOPs, F = n * V * D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from .token_losses import LossSpec, TokenLosses, TokenRows


@dataclass(frozen=True)
class LinearHead:
    """The head and the rows it is applied to: z = softcap(hidden @ weight.T + bias) / temperature.

    hidden [N, D] (any float dtype, any strides), weight [V, D] (any float dtype, any strides), target int64 [n] with
    every value in [0, V), bias [V] or None. `order` int64 [n]: the rows of hidden that count, in their order; None:
    all of them as they stand (n = N). A backend gathers them chunk by chunk. Under autocast `hidden` is already in the
    compute dtype and `weight` may still be float32: a backend casts the weight slab by slab, inside its byte budget.
    """

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None
    order: Tensor | None = None

    @property
    def n(self) -> int:
        return self.target.shape[0]

    def rows(self, part: slice) -> Tensor:
        """Rows `part` of the n, [.., D]: a view of hidden, or gathered."""
        return self.hidden[part] if self.order is None else self.hidden.index_select(0, self.order[part])


@dataclass(frozen=True)
class Options:
    """budget: bytes of temporary workspace a call may hold beyond its inputs, its results and the float32 dW.

    Under autocast hidden in autocast's type counts as an input.
    """

    budget: int = 512 << 20


class Needs(NamedTuple):
    """Which gradients the caller will use."""

    hidden: bool
    weight: bool
    bias: bool


class Grads(NamedTuple):
    """float32 weight [V, D] and bias [V]; hidden [n, D]; None where not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class RowStats(NamedTuple):
    """float32 [n] each; entropy None unless asked for."""

    logprob: Tensor
    logsumexp: Tensor
    entropy: Tensor | None


class Backend(Protocol):
    """`reference` does not implement this: it is plain autograd over full logits, the oracle of the other two."""

    def stats(self, head: LinearHead, *, with_entropy: bool, options: Options) -> RowStats:
        """Log-prob of the target, logsumexp and (optionally) entropy of every row. One GEMM."""

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
        """Gradients for any upstream float32 [n] vectors. Three GEMMs (logits again, dH, dW)."""

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
        """Statistics, token losses and the gradients of sum(token_weight * token_loss). Three GEMMs for the first
        `n_grad` rows, one for the rest (their hidden gradient is 0).

        The gradients are of the loss itself (upstream 1) times `scale`, a 0-d float32 power of two chosen so that the
        row coefficients scale * token_weight * dloss/dlogp do not underflow in fp16; autograd undoes it in float32
        together with the upstream gradient.
        """
