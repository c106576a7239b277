"""A model to sample from and nothing more: no DeepSpeed, no optimizer, no replaced head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .loading import load_model, load_tokenizer, padding_id, stop_ids


class FrozenPolicy:
    """What a rollout engine and its parity probe need of a policy, for weights that never change. model: folder or hub
    id.
    """

    step = 0
    world_size = 1

    def __init__(self, model: str | Path, *, dtype: torch.dtype) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = load_tokenizer(model)
        self.model = load_model(model, dtype=dtype, attention="sdpa").to(self.device).eval()
        self.stop_ids = stop_ids(self.model, self.tokenizer)
        self.pad_id = padding_id(self.tokenizer)

    @property
    def context_length(self) -> int:
        return int(self.model.config.get_text_config().max_position_embeddings)

    @torch.no_grad()
    def logprobs(
        self, prompt_ids: Sequence[int], response_ids: Sequence[Sequence[int]], *, temperature: float
    ) -> list[Tensor]:
        """Log-prob of every token of every response to one prompt: float32 [len(response)] on the CPU."""
        found = []
        for response in response_ids:
            ids = torch.tensor([[*prompt_ids, *response]], device=self.device)
            logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].float()
            logprob = torch.log_softmax(logits / temperature, -1)
            found.append(logprob.gather(-1, ids[0, len(prompt_ids) :, None])[:, 0].cpu())
        return found
