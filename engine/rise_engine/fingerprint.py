"""A short name for a model's weights, to tell whether two models of one shape are the same model."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn


def fingerprint(model: nn.Module) -> str:
    """16 hex digits of a SHA-256 over every parameter's name, type, shape and bytes. For a model that is whole in this
    process: before DeepSpeed splits it. One weight that differs in its last bit changes it; where the files lie and
    how they are cut does not.
    """
    names, parameters = zip(*model.named_parameters())
    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        digests = list(pool.map(_digest, parameters))
    whole = hashlib.sha256()
    for name, p, digest in zip(names, parameters, digests, strict=True):
        whole.update(f"{name} {p.dtype} {tuple(p.shape)} {digest}\n".encode())
    return whole.hexdigest()[:16]


def _digest(parameter: Tensor) -> str:
    return hashlib.sha256(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
