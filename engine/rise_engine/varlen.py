"""Packed rows through flash-attn: each span of queries with its keys is one "sequence" of a varlen call.

A response's keys are its prompt's and its own, so the prompt's keys and values are repeated for every response: memory
(of one layer at a time under activation checkpointing) for one exact call in which nothing is padded. Queries lie as
they are packed. Where queries are fewer than keys, flash-attn (2.1 and later) aligns its causal mask at the last of
both, which is what a response behind its prompt needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from .attention import Span
from .gather import gather_rows


@dataclass(frozen=True)
class VarlenLayout:
    """How one packed row attends: span i has queries [query_starts[i], query_starts[i+1]) of the row, and as its keys
    the rows key[key_starts[i] : key_starts[i+1]]. starts: int32 [spans + 1], as flash-attn wants them.
    """

    key: Tensor
    query_starts: Tensor
    key_starts: Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> VarlenLayout:
        """The spans, in the order given, must cover the row without a gap."""
        ends = [0, *(s.stop for s in spans)]
        if [s.start for s in spans] != ends[:-1]:
            raise ValueError(f"spans: expected each to begin where the one before ends, found {list(spans)}")
        return cls(
            torch.cat([s.key_rows() for s in spans]).to(device),
            _starts([s.queries for s in spans], device),
            _starts([s.keys for s in spans], device),
            max(s.queries for s in spans),
            max(s.keys for s in spans),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float) -> Tensor:
        """query [T, heads, d], key and value [T, kv_heads, d], float16 or bfloat16 -> [T, heads, d]."""
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            query.contiguous(),
            gather_rows(key, self.key),
            gather_rows(value, self.key),
            cu_seqlens_q=self.query_starts,
            cu_seqlens_k=self.key_starts,
            max_seqlen_q=self.most_queries,
            max_seqlen_k=self.most_keys,
            dropout_p=dropout,
            softmax_scale=scaling,
            causal=True,
        )


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def why_not_flash(dtype: torch.dtype) -> str | None:
    """None if flash-attn can run in this process, else what is missing."""
    if not torch.cuda.is_available():
        return "flash-attn needs a CUDA device"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn computes in bfloat16, and engine.dtype is {str(dtype).removeprefix('torch.')}"
    if find_spec("flash_attn") is None:
        return "the package flash-attn is not installed (pip install flash-attn --no-build-isolation)"
    return None
