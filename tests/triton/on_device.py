"""The kernels on the GPU where there is one, else on the interpreter."""

from __future__ import annotations

import pytest
import torch

from rise_kernels.backend import LinearHead
from rise_kernels.triton_backend.launch import Kernels, TileStats

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="CPU tensors: run on the interpreter")


def row_kernel(logprob, rows, spec):
    """(logprob, losses, own_grad, other_grad) of the row kernel, for rows whose other entries add up to 1 - p."""
    from rise_kernels.triton_backend.host import _empty_losses

    n = logprob.shape[0]
    zeros = torch.zeros(n, 8, device=DEVICE)
    head = LinearHead(zeros, torch.zeros(4, 8, device=DEVICE), zeros[:, 0].long(), None, 1.0, None)
    stats = TileStats(
        torch.zeros(n, device=DEVICE), -torch.expm1(logprob.double()).float(), None, logprob.clone()
    )  # one tile, offset 0
    out = (torch.empty(n, device=DEVICE), torch.empty(n, device=DEVICE), None)
    losses = _empty_losses(rows, n, logprob.device)
    own, other = torch.empty(2, n, device=DEVICE).unbind()
    Kernels(head).losses(stats, out, rows, spec, torch.ones((), device=DEVICE), losses, own, other)
    return out[0], losses, own, other
