"""One token from each row's distribution, by a uniform number of the row's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

BLOCK = 256


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """float64 [len(seeds), count] in [0, 1), on the CPU; row i is a function of seeds[i] alone.

    A longer row begins with the shorter one, so raising max_new_tokens leaves earlier tokens as they were.
    """
    rows = [numpy.random.Generator(numpy.random.PCG64(seed)).random(count) for seed in seeds]
    return torch.from_numpy(numpy.stack(rows)) if rows else torch.empty(0, count, dtype=torch.float64)


def sample(
    logits: Tensor, uniform: Tensor, temperature: float, *, top_p: float = 1.0, top_k: int = 0
) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling from softmax(logits / temperature); temperature 0 takes the largest logit.

    top_k > 0: from the top_k largest only; then top_p < 1: from the fewest largest whose share of what is left reaches
    top_p (both as transformers and vLLM).
    logits [n, V] of any float dtype, uniform float64 [n]. Returns token int64 [n] and its log-prob float32 [n] under
    softmax(logits / temperature) whole, whatever top_p and top_k; for temperature 0 under softmax(logits), because the
    point mass it samples from says nothing. A token of probability 0 is never chosen.
    """
    if temperature == 0:
        token = logits.argmax(-1, keepdim=True)
        return token[:, 0], _logprob(torch.softmax(logits.float(), -1), token)
    whole = torch.softmax(logits.float() / temperature, -1)
    probability = whole if top_k == 0 and top_p == 1 else whole.where(within(whole, top_p, top_k), 0.0)
    # Two levels: which block of the vocabulary, then which token in it. Summing a block is far cheaper than a running
    # sum over 150,000 tokens, and float64 is needed only for the few numbers that are left.
    padding = -probability.shape[-1] % BLOCK
    blocks = torch.nn.functional.pad(probability, (0, padding)).unflatten(-1, (-1, BLOCK))
    block, rest = _invert(blocks.sum(-1).double(), uniform[:, None], relative=True)
    inside, _ = _invert(blocks[torch.arange(len(blocks), device=blocks.device), block[:, 0]].double(), rest)
    token = block * BLOCK + inside
    return token[:, 0], _logprob(whole, token)


def within(probability: Tensor, top_p: float, top_k: int) -> Tensor:
    """bool [n, V]: what top_k, then top_p, leave; always at least the likeliest token. Ties at the k-th place stay."""
    ranked = probability.sort(-1, descending=True)
    kept = ranked.values
    if top_k > 0:
        kept = kept.where(kept >= kept[:, min(top_k, kept.shape[-1]) - 1, None], 0.0)
    before = kept.double().cumsum(-1) - kept
    chosen = (kept > 0) & (before < top_p * kept.double().sum(-1, keepdim=True))
    chosen[:, 0] = True
    return torch.zeros_like(chosen).scatter(-1, ranked.indices, chosen)


def _invert(mass: Tensor, target: Tensor, *, relative: bool = False) -> tuple[Tensor, Tensor]:
    """The first index whose running sum exceeds the target [n, 1], and how far the target reaches into it."""
    running = mass.cumsum(-1)
    total = running[:, -1:]
    target = torch.minimum(target * total if relative else target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(running, target, right=True)
    return index, (target - (running - mass).gather(-1, index)).clamp(min=0)


def _logprob(probability: Tensor, token: Tensor) -> Tensor:
    return probability.gather(-1, token)[:, 0].log()
