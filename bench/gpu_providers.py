"""GPU providers of bench/loss.py: peers that exist as CUDA kernels, and what torch itself compiles.

Each is called through its public function with the arguments its own trainer or documentation uses. Those that return a
log-prob or a loss per token get the policy loss around them in torch; those that only return a mean or a sum can do
`--loss ce` alone, and say so otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from providers import Absent, Problem, Provider, Step
from torch import Tensor

CUDA = ("cuda",)


def around(problem: Problem, logprob: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """A step from a function (hidden, weight) -> log-prob [N]."""

    def step():
        hidden, weight = problem.leaves()
        return problem.gradients(problem.loss_of(logprob(hidden, weight).float().view(-1)), hidden, weight)

    return step


def mean_only(problem: Problem, name: str, loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
    if problem.loss != "ce":
        raise Absent(f"{name} returns only the mean cross-entropy: run with --loss ce")

    def step():
        hidden, weight = problem.leaves()
        return problem.gradients(loss(hidden, weight).float(), hidden, weight)

    return step


def compiled_chunks(problem: Problem, rows: int = 1024) -> Step:
    """What a careful user writes: torch.compile around a chunk's log-prob, recomputed in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    @torch.compile(dynamic=False)
    def chunk(hidden, weight, target):
        logits = (hidden @ weight.T).float()
        return logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(-1)

    def logprob(hidden, weight):
        parts = zip(hidden.split(rows), problem.target.clamp(min=0).split(rows))
        return torch.cat([checkpoint(chunk, h, weight, t, use_reentrant=False) for h, t in parts])

    return around(problem, logprob)


def torch_linear_cross_entropy(problem: Problem) -> Step:
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if function is None or options is None:
        raise Absent(f"torch {torch.__version__} has no chunked torch.nn.functional.linear_cross_entropy")
    chunked = options()
    return mean_only(
        problem, "F.linear_cross_entropy, chunked,", lambda h, w: function(h, w, problem.target, options=chunked)
    )


def liger_cross_entropy(problem: Problem) -> Step:
    """Liger's fused linear cross-entropy with float32 dW, as its documentation recommends for training stability."""
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    except ImportError as error:
        raise Absent(f"liger-kernel is not installed ({error})") from error

    def loss(hidden, weight):
        return LigerFusedLinearCrossEntropyFunction.apply(
            hidden, weight, problem.target, None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32
        )[0]

    return mean_only(problem, "Liger's fused linear cross-entropy", loss)


def liger_scaled_cross_entropy(problem: Problem) -> Step:
    """Liger's CuTe kernel for Hopper: a loss per token."""
    try:
        from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import (
            LigerFusedScaledCrossEntropySM90Function,
        )
    except ImportError as error:
        raise Absent(f"Liger's SM90 scaled cross-entropy is not installed ({error})") from error

    def logprob(hidden, weight):
        out = LigerFusedScaledCrossEntropySM90Function.apply(hidden, weight, problem.target)
        return -(out[0] if isinstance(out, tuple) else out)

    return around(problem, logprob)


def cut_cross_entropy(**keywords: None) -> Callable[[Problem], Step]:
    """As it comes it skips small entries of the gradient; filter_eps=None: exact gradients."""

    def build(problem: Problem) -> Step:
        try:
            from cut_cross_entropy import linear_cross_entropy
        except ImportError as error:
            raise Absent(f"cut-cross-entropy is not installed ({error})") from error
        return around(problem, lambda h, w: -linear_cross_entropy(h, w, problem.target, reduction="none", **keywords))

    return build


def quack(problem: Problem) -> Step:
    try:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy
    except ImportError as error:
        raise Absent(f"quack-kernels is not installed ({error})") from error
    return mean_only(
        problem, "QuACK's chunked linear cross-entropy", lambda h, w: chunked_linear_cross_entropy(h, w, problem.target)
    )


def verl_kernel(problem: Problem) -> Step:
    """verl's fused kernel, as its models call it: log-prob and entropy."""
    linear_cross_entropy = _verl("utils.kernel.linear_cross_entropy").linear_cross_entropy
    return around(problem, lambda h, w: linear_cross_entropy(h, w, problem.target.clamp(min=0), 1.0, "none")[0])


def _verl(module: str) -> ModuleType:
    """A module of verl where verl itself may not be importable: its __init__ files want ray and a dozen more, its
    kernel torch and triton only. So the packages on the way stand there as bare folders."""
    if "verl" not in sys.modules:
        spec = find_spec("verl")
        if spec is None or not spec.submodule_search_locations:
            raise Absent("verl is not installed")
        for name in ("verl", "verl.utils"):
            package = sys.modules[name] = ModuleType(name)
            package.__path__ = [str(Path(where, *name.split(".")[1:])) for where in spec.submodule_search_locations]
    return import_module(f"verl.{module}")


# In the order in which they are tried: those that compile for long, then those in CuTe, come last.
GPU_PROVIDERS = (
    Provider("torch linear_cross_entropy", torch_linear_cross_entropy, 6, CUDA),
    Provider("liger fused linear ce", liger_cross_entropy, 6, CUDA),
    Provider("cut-cross-entropy", cut_cross_entropy(), 8, CUDA),
    Provider("cut-cross-entropy exact", cut_cross_entropy(filter_eps=None), 8, CUDA),
    Provider("verl fused", verl_kernel, 8, CUDA),
    Provider("compiled chunks", compiled_chunks, 8, CUDA),
    Provider("quack chunked ce", quack, 6, CUDA),
    Provider("liger sm90 scaled ce", liger_scaled_cross_entropy, 8, CUDA),
)
