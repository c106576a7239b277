"""From sequences to micro-batches under a token budget.

Two layouts. `shared_prompt`: responses to one prompt lie behind it in one packed row, prompt | response 1 |
response 2 | ..., the prompt computed once, no padding anywhere (attention.py says which token sees which;
`shared_prompt_flash` is the same through flash-attn, varlen.py). `padded`: one sequence a row, rows of similar length
together; for models whose attention cannot be told about spans.

Either way the head is applied only to the hidden states that predict a response token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import attention
from .attention import Layout, Span
from .varlen import VarlenLayout, why_not_flash

LayoutName = Literal["shared_prompt", "shared_prompt_flash", "padded"]


class HasTokens(Protocol):
    @property
    def prompt_ids(self) -> tuple[int, ...]: ...
    @property
    def response_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Chunk:
    """Responses that share one prompt in one micro-batch. members: indices into the list that was planned."""

    prompt_ids: tuple[int, ...]
    members: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. input_ids, position_ids int64 [B, L]; layout (shared_prompt) or attention_mask [B, L] (padded).

    hidden_rows, target int64 [N]: the flattened [B * L] row whose hidden state predicts each response token, sequence
    after sequence in the order of `members` with `lengths` tokens each.
    """

    members: tuple[int, ...]
    lengths: tuple[int, ...]
    input_ids: Tensor
    position_ids: Tensor
    hidden_rows: Tensor
    target: Tensor
    layout: Layout | VarlenLayout | None = None
    attention_mask: Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.input_ids.numel()


def choose_layout(model: PreTrainedModel, wanted: Literal["auto", "sdpa", "flash_attention_2", "eager"]) -> LayoutName:
    """Gives the model its attention function; returns how its sequences are to be laid out.

    Raises ValueError, with the reason, where flash_attention_2 is asked for by name and cannot run.
    """
    no_flash = why_not_flash(model.dtype)
    if wanted == "flash_attention_2" and no_flash is not None:
        raise ValueError(f"engine.attention: flash_attention_2 cannot be used: {no_flash}")
    flash = wanted == "flash_attention_2" or (wanted == "auto" and no_flash is None)
    if wanted != "eager" and attention.why_not_packed(model) is None:
        model.set_attn_implementation(attention.NAME)
        return "shared_prompt_flash" if flash else "shared_prompt"
    model.set_attn_implementation("flash_attention_2" if flash else "eager" if wanted == "eager" else "sdpa")
    return "padded"


def plan_shared_prompt(sequences: Sequence[HasTokens], budget: int) -> list[list[Chunk]]:
    """Micro-batches of at most `budget` packed tokens, longest first; deterministic.

    A prompt whose responses do not fit together is computed once per part. A sequence longer than the budget is alone.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for i, sequence in enumerate(sequences):
        by_prompt.setdefault(sequence.prompt_ids, []).append(i)
    chunks: list[Chunk] = []
    for prompt, members in by_prompt.items():
        members.sort(key=lambda i: -len(sequences[i].response_ids))
        sizes = [len(sequences[i].response_ids) for i in members]
        chunks += [
            Chunk(prompt, tuple(members[j] for j in part), len(prompt) + sum(sizes[j] for j in part))
            for part in _first_fit(sizes, budget - len(prompt))
        ]
    chunks.sort(key=lambda c: -c.tokens)
    return [[chunks[j] for j in part] for part in _first_fit([c.tokens for c in chunks], budget)]


def plan_padded(sequences: Sequence[HasTokens], budget: int) -> list[list[Chunk]]:
    """As above for one sequence a row: rows x longest row is within `budget`."""

    def length(i: int) -> int:
        return len(sequences[i].prompt_ids) + len(sequences[i].response_ids)

    batches: list[list[Chunk]] = []
    for i in sorted(range(len(sequences)), key=lambda i: -length(i)):
        chunk = Chunk(sequences[i].prompt_ids, (i,), length(i))
        if batches and (len(batches[-1]) + 1) * batches[-1][0].tokens <= budget:
            batches[-1].append(chunk)
        else:
            batches.append([chunk])
    return batches


def _first_fit(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of indices whose sizes (given in descending order) fit the budget; one that never fits is alone."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i, size in enumerate(sizes):
        home = next((b for b, r in enumerate(room) if size <= r), None)
        if home is None:
            bins.append([i])
            room.append(budget - size)
        else:
            bins[home].append(i)
            room[home] -= size
    return bins


def build(
    sequences: Sequence[HasTokens], chunks: Sequence[Chunk], name: LayoutName, *, pad_id: int, device: torch.device
) -> MicroBatch:
    """The tensors of one planned micro-batch."""
    if name == "padded":
        return _padded(sequences, chunks, pad_id, device)
    return _shared_prompt(sequences, chunks, VarlenLayout if name == "shared_prompt_flash" else Layout, device)


def plan(sequences: Sequence[HasTokens], budget: int, name: LayoutName) -> list[list[Chunk]]:
    return (plan_padded if name == "padded" else plan_shared_prompt)(sequences, budget)


def _shared_prompt(
    sequences: Sequence[HasTokens],
    chunks: Sequence[Chunk],
    layout: type[Layout] | type[VarlenLayout],
    device: torch.device,
) -> MicroBatch:
    ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    target: list[int] = []
    spans: list[Span] = []
    for chunk in chunks:
        start = len(ids)
        ids += chunk.prompt_ids
        stop = len(ids)
        positions += range(stop - start)
        # A prompt with one response is one causal span: no mask, and half the scores are never computed.
        alone = len(chunk.members) == 1
        spans.append(Span(start, stop + len(sequences[chunk.members[0]].response_ids) - 1 if alone else stop))
        for i in chunk.members:
            response = sequences[i].response_ids
            # The last token of a response predicts nothing that is trained on, so it need not be computed.
            begin, end = len(ids), len(ids) + len(response) - 1
            ids += response[:-1]
            positions += range(stop - start, stop - start + end - begin)
            if end > begin and not alone:
                spans.append(Span(begin, end, start, stop))
            rows += [stop - 1, *range(begin, end)]
            target += response
    members = tuple(i for c in chunks for i in c.members)
    return MicroBatch(
        members=members,
        lengths=tuple(len(sequences[i].response_ids) for i in members),
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        hidden_rows=torch.tensor(rows, device=device),
        target=torch.tensor(target, device=device),
        layout=layout.of(spans, device),
    )


def _padded(sequences: Sequence[HasTokens], chunks: Sequence[Chunk], pad_id: int, device: torch.device) -> MicroBatch:
    members = tuple(i for c in chunks for i in c.members)
    texts = [[*sequences[i].prompt_ids, *sequences[i].response_ids[:-1]] for i in members]
    width = max(map(len, texts))
    rows: list[int] = []
    target: list[int] = []
    for b, (i, text) in enumerate(zip(members, texts)):
        response = sequences[i].response_ids
        rows += range(b * width + len(text) - len(response), b * width + len(text))
        target += response
    mask = torch.tensor([[1] * len(t) + [0] * (width - len(t)) for t in texts], device=device)
    return MicroBatch(
        members=members,
        lengths=tuple(len(sequences[i].response_ids) for i in members),
        input_ids=torch.tensor([t + [pad_id] * (width - len(t)) for t in texts], device=device),
        position_ids=torch.arange(width, device=device).expand(len(texts), -1),
        hidden_rows=torch.tensor(rows, device=device),
        target=torch.tensor(target, device=device),
        attention_mask=mask,
    )
