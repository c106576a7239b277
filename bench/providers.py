"""Who computes the loss in bench/loss.py: one entry per provider in PROVIDERS, the place to add another.

A provider is built for one problem and gives a function that does one forward and backward pass and returns
(loss, dH, dW). What cannot run raises `Absent` with the reason, which the benchmark prints. Every provider computes the
same number: the GRPO loss at ratio 1 (or the guide loss), averaged over all N tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Step = Callable[[], tuple[Tensor | None, Tensor | None, Tensor | None]]
CLIP_LOW, CLIP_HIGH, GAMMA = 0.2, 0.28, 0.1
IGNORED = -100


class Absent(Exception):
    """This provider cannot run here; the message says why."""


@dataclass
class Problem:
    """Sequences of N tokens in all: hidden [N, D], weight [V, D], target [N], advantage [sequences], lengths of the
    sequences (equal unless ragged).

    Rows with target IGNORED count for nothing; the loss is averaged over the others.
    loss: "policy", "guide", or "ce": the mean cross-entropy, all that some peers can do; its gradient is the policy
    loss's with every advantage 1. forward_only: no gradients are wanted.
    """

    hidden: Tensor
    weight: Tensor
    target: Tensor
    advantage: Tensor
    loss: str
    lengths: Tensor
    forward_only: bool = False

    @staticmethod
    def random(
        n: int,
        d: int,
        v: int,
        *,
        sequences: int,
        loss: str,
        dtype: torch.dtype,
        device: str,
        peaked: bool = False,
        ragged: bool = False,
    ) -> Problem:
        """Hidden states of unit scale and a head whose log-probs spread like a language model's; fixed seed.

        peaked: like a trained model on its own samples, nine tokens of ten at probabilities from 0.5 to 1.
        ragged: a packed stream of sequences of unequal length, about 30 % of each ignored: its prompt comes first.
        """
        g, there = torch.Generator(device).manual_seed(0), torch.device(device)
        hidden = torch.randn(n, d, generator=g, device=there)
        weight = torch.randn(v, d, generator=g, device=there).mul_(2.0 / d**0.5)
        target = torch.randint(0, v, (n,), generator=g, device=there)
        # Half of the tokens are what the model itself would say: their log-probs are near 0.
        row = torch.arange(n, device=there)
        likely = row % 10 > 0 if peaked else row % 2 == 0
        push = 3.0 + 3.0 * torch.rand(n, 1, generator=g, device=there)[likely] if peaked else 3.0
        hidden[likely] = hidden[likely] * 0.5 + weight[target[likely]] * push
        lengths = torch.full((sequences,), n // sequences, device=there)
        if ragged:
            share = torch.rand(sequences, generator=g, device=there) + 0.1
            ends = (share.cumsum(0) / share.sum() * n).round().long()
            ends[-1] = n
            lengths = ends.diff(prepend=ends.new_zeros(1))
            for end, length in zip(ends.tolist(), lengths.tolist()):
                target[end - length : end - length + round(0.3 * length)] = IGNORED
        advantage = torch.randn(sequences, generator=g, device=there)
        if loss == "ce":
            advantage = torch.ones_like(advantage)
        return Problem(hidden.to(dtype), weight.to(dtype), target, advantage, loss, lengths)

    @property
    def n(self) -> int:
        return self.hidden.shape[0]

    @property
    def sequences(self) -> int:
        return self.advantage.shape[0]

    @property
    def ragged(self) -> bool:
        return bool((self.lengths != self.lengths[0]).any() or (self.target == IGNORED).any())

    @property
    def counted(self) -> int:
        """Rows that are not ignored."""
        return int((self.target != IGNORED).sum())

    def token_advantage(self) -> Tensor:
        return self.advantage.repeat_interleave(self.lengths)

    def token_weight(self) -> Tensor:
        """1 / counted on the rows that count."""
        return (self.target != IGNORED) / torch.tensor(float(self.counted), device=self.hidden.device)

    def leaves(self) -> tuple[Tensor, Tensor]:
        wanted = not self.forward_only
        return self.hidden.detach().requires_grad_(wanted), self.weight.detach().requires_grad_(wanted)

    def gradients(self, loss: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(loss, dH, dW); the gradients None if only the forward pass is measured."""
        if not self.forward_only:
            loss.backward()
        return loss.detach(), hidden.grad, weight.grad

    def loss_of(self, logprob: Tensor) -> Tensor:
        """From log-probs, in plain torch: what a trainer writes around eager logits or a log-prob kernel."""
        weight = self.token_weight()
        logprob = logprob.masked_fill(weight == 0, 0.0)
        if self.loss == "ce":
            return -(weight * logprob).sum()
        if self.loss == "guide":
            return -(weight * torch.sigmoid(logprob - torch.tensor(GAMMA).log()).log()).sum()
        advantage = self.token_advantage()
        ratio = torch.exp(logprob - logprob.detach())
        surrogate = torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH))
        return -(weight * surrogate).sum()


def three_products(problem: Problem) -> Step:
    """The floor: hidden @ weight.T and the two products of the backward pass, into buffers made beforehand."""
    hidden, weight = problem.hidden, problem.weight
    z = hidden @ weight.T
    dh, dw = torch.empty_like(hidden), torch.empty_like(weight)

    def step():
        torch.mm(hidden, weight.T, out=z)
        if problem.forward_only:
            return None, None, None
        torch.mm(z, weight, out=dh)
        torch.mm(z.T, hidden, out=dw)
        return None, dh, dw

    return step


def eager(problem: Problem) -> Step:
    """Full logits in torch, as a plain training loop has them; log-softmax in float32, logits not kept beside it."""

    def step():
        hidden, weight = problem.leaves()
        log_p = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
        logprob = log_p.gather(1, problem.target.clamp(min=0)[:, None]).squeeze(1)
        del log_p
        loss = problem.loss_of(logprob)
        return problem.gradients(loss, hidden, weight)

    return step


def ours(backend: str) -> Callable[[Problem], Step]:
    def build(problem: Problem) -> Step:
        import rise_kernels
        from rise_kernels.select import select_backend

        try:
            select_backend(backend, problem.hidden.device)
        except RuntimeError as error:
            raise Absent(str(error)) from error
        token_weight, advantage = problem.token_weight(), problem.token_advantage()

        def step():
            hidden, weight = problem.leaves()
            args = (hidden, weight, problem.target, token_weight)
            if problem.loss == "guide":
                loss = rise_kernels.linear_guide_loss(*args, gamma=GAMMA, backend=backend).loss
            else:
                out = rise_kernels.linear_policy_loss(
                    *args, advantage, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, backend=backend
                )
                loss = out.loss
                if problem.loss == "ce":  # the same gradient, but the value at ratio 1 is minus the mean advantage
                    loss = loss - loss.detach() - (token_weight * out.logprob).sum()
            return problem.gradients(loss, hidden, weight)

        return step

    return build


def ours_mixed(backend: str) -> Callable[[Problem], Step]:
    """linear_rise_loss, every other row natural, the others guided: what RISE-RL trains with. Its value and gradients
    are its own, so only its cost is compared."""

    def build(problem: Problem) -> Step:
        import rise_kernels
        from rise_kernels.select import select_backend

        try:
            select_backend(backend, problem.hidden.device)
        except RuntimeError as error:
            raise Absent(str(error)) from error
        token_weight, advantage = problem.token_weight(), problem.token_advantage()
        is_guide = torch.arange(problem.n, device=token_weight.device) % 2 == 1

        def step():
            hidden, weight = problem.leaves()
            loss = rise_kernels.linear_rise_loss(
                hidden, weight, problem.target, token_weight, advantage, is_guide,
                gamma=GAMMA, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, backend=backend,
            ).loss  # fmt: skip
            return problem.gradients(loss, hidden, weight)

        return step

    return build


def ours_logprob(backend: str) -> Callable[[Problem], Step]:
    """linear_logprob with the loss in torch around it: any loss, at 8 F."""

    def build(problem: Problem) -> Step:
        import rise_kernels

        def step():
            hidden, weight = problem.leaves()
            stats = rise_kernels.linear_logprob(hidden, weight, problem.target, backend=backend)
            loss = problem.loss_of(stats.logprob)
            return problem.gradients(loss, hidden, weight)

        return step

    return build


def liger_grpo(compiled: bool) -> Callable[[Problem], Step]:
    """liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss with its default chunk of one sequence."""

    def build(problem: Problem) -> Step:
        try:
            from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
        except ImportError as error:
            raise Absent(f"liger-kernel is not installed ({error})") from error
        if problem.loss != "policy":
            raise Absent(f"Liger's GRPO loss is not the {problem.loss} loss")
        if problem.ragged:
            raise Absent("Liger's GRPO loss takes a padded batch, not a packed stream")
        loss_fn = LigerFusedLinearGRPOLoss(
            beta=0.0, compiled=compiled, use_ref_model=False, epsilon_low=CLIP_LOW, epsilon_high=CLIP_HIGH,
            loss_type="dapo",
        )  # fmt: skip
        shape = (problem.sequences, problem.n // problem.sequences)
        target, mask = problem.target.view(shape), torch.ones(shape, device=problem.hidden.device)

        def step():
            hidden, weight = problem.leaves()
            loss, _ = loss_fn(hidden.view(*shape, -1), weight, target, mask, problem.advantage)
            return problem.gradients(loss, hidden, weight)

        return step

    return build


def trl_logprob(problem: Problem) -> Step:
    """trl's ChunkedLogProbFunction with the trainer's own chunk size, the loss in torch around it."""
    try:
        from trl.kernels import ChunkedLogProbFunction
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE
    except ImportError as error:
        raise Absent(f"trl with its chunked log-prob is not installed ({error})") from error

    def step():
        hidden, weight = problem.leaves()
        logprob, *_ = ChunkedLogProbFunction.apply(
            hidden, weight, None, problem.target.clamp(min=0), 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ()
        )
        loss = problem.loss_of(logprob)
        return problem.gradients(loss, hidden, weight)

    return step


@dataclass(frozen=True)
class Provider:
    """`products` counts multiples of F = N V D in the products of a step."""

    name: str
    build: Callable[[Problem], Step]
    products: int
    devices: tuple[str, ...] = ("cpu", "cuda")
    own_loss: bool = False  # of another loss than the problem's: its errors are not shown


FLOOR, EAGER, OURS, TRITON = "three products", "eager torch", "rise chunked", "rise triton"
PROVIDERS = (
    Provider(FLOOR, three_products, 6),
    Provider(EAGER, eager, 6),
    Provider(OURS, ours("chunked"), 6),
    Provider("rise chunked mixed", ours_mixed("chunked"), 6, ("cpu",), own_loss=True),
    Provider("rise chunked logprob", ours_logprob("chunked"), 8),
    Provider(TRITON, ours("triton"), 6, ("cuda",)),
    Provider("rise triton mixed", ours_mixed("triton"), 6, ("cuda",), own_loss=True),
    Provider("rise triton logprob", ours_logprob("triton"), 8, ("cuda",)),
    Provider("rise reference", ours("reference"), 6, ("cpu",)),  # in float32 throughout: seconds on a GPU
    Provider("liger grpo", liger_grpo(compiled=False), 8),
    Provider("liger grpo compiled", liger_grpo(compiled=True), 8),
    Provider("trl chunked logprob", trl_logprob, 8),
)
