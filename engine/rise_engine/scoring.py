"""Log-probs of given tokens under a model, no gradient; the same number of passes on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .distributed import all_ranks_max
from .packing import HasTokens, LayoutName, build, plan


@dataclass(frozen=True)
class Tokens:
    """A response under a prompt, and nothing else."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]


@torch.no_grad()
def token_logprobs(
    module: nn.Module,
    sequences: Sequence[HasTokens],
    *,
    temperature: float,
    budget: int,
    layout: LayoutName,
    pad_id: int,
    device: torch.device,
) -> list[Tensor]:
    """Log-prob of every response token: float32 [len(response)] on the CPU, for each of this rank's sequences.

    module: a PolicyModule, wrapped or not. budget, layout: as packing.plan. Collective: a rank with fewer micro-batches
    makes idle passes, because sharded parameters are gathered in each.
    """
    found: list[Tensor] = [torch.empty(0)] * len(sequences)

    def run(chosen: Sequence[HasTokens], planned: list) -> list[tuple[int, Tensor]]:
        batch = build(chosen, planned, layout, pad_id=pad_id, device=device)
        logprob = module(batch, temperature=temperature, with_entropy=False).logprob.cpu()
        return list(zip(batch.members, logprob.split(list(batch.lengths))))

    batches = plan(sequences, budget, layout)
    rounds = int(all_ranks_max(len(batches), device))  # agreed upon before the first pass, which is collective too
    for planned in batches:
        for member, values in run(sequences, planned):
            found[member] = values
    idle = [Tokens((pad_id,), (pad_id,))]
    for _ in range(rounds - len(batches)):
        run(idle, plan(idle, budget, layout)[0])
    return found
