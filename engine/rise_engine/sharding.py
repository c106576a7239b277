"""Which rank trains on what: a step's sequences split so that every rank computes about as many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from .packing import HasTokens, LayoutName, plan

S = TypeVar("S", bound=HasTokens)


def share(sequences: Sequence[S], *, rank: int, world_size: int, budget: int, layout: LayoutName) -> list[S]:
    """The part of `sequences` that rank `rank` of `world_size` trains on, in their order.

    Every rank calls this with the same sequences and works out the same split: each sequence goes to exactly one rank.
    What moves together is a chunk of the packing plan (shared_prompt: the responses of one prompt that fit `budget`
    tokens, the prompt counted once; padded: one sequence), so a prompt is computed as often as on one rank. Chunks go,
    longest first, to the rank with the fewest tokens so far (Graham's LPT rule): no rank gets more than the mean plus
    (1 - 1/world_size) of the longest chunk. Ties go to the earlier sequence and the lower rank.

    Leave out beforehand what will not be forwarded, or the balance is over work that nobody does.
    Raises ValueError for a rank outside the group.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: expected 0 to {world_size - 1}, found {rank}")
    chunks = [chunk for batch in plan(sequences, budget, layout) for chunk in batch]
    chunks.sort(key=lambda c: (-c.tokens, min(c.members)))
    loads = [0] * world_size
    mine: list[int] = []
    for chunk in chunks:
        lightest = loads.index(min(loads))
        loads[lightest] += chunk.tokens
        if lightest == rank:
            mine += chunk.members
    return [sequences[i] for i in sorted(mine)]
