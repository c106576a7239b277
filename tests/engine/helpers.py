"""The oracle of the tests: a plain transformers model, full logits, one sequence at a time, formulas written out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rise_engine.sequences import TrainSequence

GAMMA, CLIP_LOW, CLIP_HIGH = 0.1, 0.2, 0.28


def plain_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").train()


def plain_distribution(model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], t: float) -> Tensor:
    """log softmax of full logits at every response position: [len(response), V]."""
    ids = torch.tensor([[*prompt, *response]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / t, dim=-1)


def plain_logprobs(model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], t: float) -> Tensor:
    return plain_distribution(model, prompt, response, t).gather(-1, torch.tensor(response)[:, None])[:, 0]


def plain_loss(model: PreTrainedModel, sequences: Sequence[TrainSequence], t: float) -> Tensor:
    total = torch.zeros((), dtype=next(model.parameters()).dtype)
    for s in sequences:
        logp = plain_logprobs(model, s.prompt_ids, s.response_ids, t)
        if s.is_guide:
            token_loss = -torch.log(logp.exp() / (logp.exp() + GAMMA))
        else:
            old = logp.detach() if s.old_logprob is None else torch.tensor(s.old_logprob, dtype=logp.dtype)
            ratio = (logp - old).exp()
            bounded = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            token_loss = -torch.minimum(ratio * s.advantage, bounded * s.advantage)
        total = total + (s.token_weight * token_loss).sum()
    return total


def plain_steps(
    model: PreTrainedModel, steps: Sequence[Sequence[TrainSequence]], *, t: float, lr: float, eps: float, clip: float
) -> list[tuple[float, float]]:
    """Plain AdamW steps; returns (loss, gradient norm) of each. Weight decay 0.1 on matrices, betas 0.9 / 0.999."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, eps=eps, fused=False, foreach=False)
    record = []
    for sequences in steps:
        loss = plain_loss(model, sequences, t)
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
        for p in model.parameters():
            p.grad.mul_(min(1.0, clip / norm))
        optimizer.step()
        optimizer.zero_grad()
        record.append((loss.item(), norm))
    return record


def a_step(seed: int = 0, *, prompts: int = 3, vocab: int = 384) -> list[TrainSequence]:
    """Prompts of different length, each with natural and guide rows of different length, one of a single token."""
    g = torch.Generator().manual_seed(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, vocab, (n,), generator=g).tolist())

    rows = []
    for k in range(prompts):
        prompt = ids(4 + 5 * k)
        for length, advantage in ((9, 1.0), (3, -0.7), (14, 0.4), (1, -1.2)):
            rows.append(TrainSequence(f"p{k}", prompt, ids(length), 0.02, advantage))
        rows.append(TrainSequence(f"p{k}", prompt, ids(6 + k), 0.01 + 0.01 * k, is_guide=True))
    return rows
