"""Sampling many answers at once from a transformers model: prompts once, then one token for every row at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from .base import RolloutRequest, Sampling
from .kv_cache import DecodeCache
from .sampler import sample, uniforms

# Tokens, padding counted, of one prefill pass: bounds its activations, and is enough to keep a machine busy.
PREFILL_TOKENS = 8192


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    requests: Sequence[RolloutRequest],
    *,
    sampling: Sampling,
    stop_ids: Sequence[int],
    pad_id: int,
    device: torch.device,
    finished: Callable[[int], None],
) -> list[Answer]:
    """One answer per request, all decoded together; `finished(n)` is called as n rows end. `model` is in eval mode."""
    max_new_tokens = sampling.max_new_tokens
    prompts = list(dict.fromkeys(r.prompt_ids for r in requests))
    place = {prompt: i for i, prompt in enumerate(prompts)}
    owners = torch.tensor([place[r.prompt_ids] for r in requests], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    width = int(lengths.max())

    cache, hidden = prefill(model, prompts, width, pad_id, device)
    rows = DecodeCache(cache, owners, width + max_new_tokens)
    head = model.get_output_embeddings()
    logits = head(hidden)[owners]
    visible = torch.arange(width + max_new_tokens, device=device) >= (width - lengths)[owners, None]
    position = lengths[owners]
    draws = uniforms([r.seed for r in requests], max_new_tokens).to(device)
    stops = torch.tensor(list(stop_ids), device=device)

    answers = [Answer() for _ in requests]
    active = list(range(len(requests)))
    for step in range(max_new_tokens):
        token, logprob = sample(
            logits, draws[:, step], sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k
        )
        stopped = torch.isin(token, stops)
        done = []
        for row, (t, p, s) in enumerate(zip(token.tolist(), logprob.tolist(), stopped.tolist())):
            answer = answers[active[row]]
            answer.token_ids.append(t)
            answer.logprobs.append(p)
            answer.stopped = s
            if s or step + 1 == max_new_tokens:
                done.append(row)
        if done:
            finished(len(done))
            if len(done) == len(active):
                break
            order = rows.drop(done, len(active))
            active = [active[row] for row in order]
            token, draws, visible, position = (x[order] for x in (token, draws, visible, position))
        hidden = model.base_model(
            input_ids=token[:, None],
            attention_mask=visible[:, : width + step + 1],
            position_ids=(position + step)[:, None],
            past_key_values=rows,
            use_cache=True,
        ).last_hidden_state
        logits = head(hidden[:, -1])
    return answers


def prefill(
    model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], width: int, pad_id: int, device: torch.device
) -> tuple[DynamicCache, Tensor]:
    """Keys and values of every prompt, left-padded to `width`, and the hidden state [n, D] after its last token."""
    parts = max(1, PREFILL_TOKENS // width)
    hidden: list[Tensor] = []
    caches: list[DynamicCache] = []
    for i in range(0, len(prompts), parts):
        some = prompts[i : i + parts]
        gaps = [width - len(p) for p in some]
        mask = torch.arange(width) >= torch.tensor(gaps)[:, None]
        output = model.base_model(
            input_ids=torch.tensor([[pad_id] * gap + list(p) for gap, p in zip(gaps, some)], device=device),
            attention_mask=mask.to(device),
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0).to(device),
            use_cache=True,
            past_key_values=DynamicCache(),
        )
        hidden.append(output.last_hidden_state[:, -1])
        caches.append(output.past_key_values)
    for i, layer in enumerate(caches[0].layers):
        layer.keys = torch.cat([c.layers[i].keys for c in caches])
        layer.values = torch.cat([c.layers[i].values for c in caches])
    return caches[0], torch.cat(hidden)
