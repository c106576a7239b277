"""A model to sample from and nothing more: no DeepSpeed, no optimizer, no replaced head."""

from __future__ import annotations

from pathlib import Path

import torch

from .loading import load_model, load_tokenizer, padding_id, stop_ids


class FrozenPolicy:
    """What `TransformersRollout` needs of a policy, for weights that never change. model: folder or hub id."""

    step = 0
    world_size = 1

    def __init__(self, model: str | Path, *, dtype: torch.dtype, attention: str = "sdpa") -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = load_tokenizer(model)
        self.model = load_model(model, dtype=dtype, attention=attention).to(self.device).eval()
        self.stop_ids = stop_ids(self.model, self.tokenizer)
        self.pad_id = padding_id(self.tokenizer)

    @property
    def context_length(self) -> int:
        return int(self.model.config.get_text_config().max_position_embeddings)
