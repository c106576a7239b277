"""The policy's weights as another engine wants them: whole tensors under transformers' names, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .lora import merged

if TYPE_CHECKING:
    from .frozen import FrozenPolicy
    from .policy import PolicyEngine

BUCKET_BYTES = 512 << 20
"""Gathered at once under ZeRO-3: large enough for few collectives, small beside any model that needs ZeRO-3."""


def named_weights(policy: PolicyEngine | FrozenPolicy) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter, in the order of the layers. A tied head comes under its own name too;
    adapters come merged into the weights that they adapt.

    Under ZeRO-3 this is a collective: every rank walks it to its end, and what it gets are copies. Otherwise the
    tensors are the parameters themselves: read them before the next optimizer step.
    """
    return merged(policy.model, gathered(policy.model))


@torch.no_grad()
def gathered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for bucket in buckets(list(model.named_parameters(remove_duplicate=False)), BUCKET_BYTES):
        if any(hasattr(parameter, "ds_id") for _, parameter in bucket):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
                whole = [(name, parameter.detach().clone()) for name, parameter in bucket]
            yield from whole
            del whole  # before the next bucket is gathered
        else:
            yield from ((name, parameter.detach()) for name, parameter in bucket)


def buckets(named: list[tuple[str, nn.Parameter]], size: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Runs of parameters of at most `size` bytes together; a larger one is alone."""
    bucket: list[tuple[str, nn.Parameter]] = []
    held = 0
    for name, parameter in named:
        needed = int(getattr(parameter, "ds_numel", parameter.numel())) * parameter.element_size()
        if bucket and held + needed > size:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, parameter))
        held += needed
    if bucket:
        yield bucket
