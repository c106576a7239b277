"""Which backend a call runs on."""

from __future__ import annotations

from importlib import import_module
from typing import Literal

import torch

from .backend import Backend

BackendName = Literal["auto", "reference", "chunked", "triton"]
BACKENDS = ("auto", "reference", "chunked", "triton")


def triton_unavailable(device: torch.device) -> str | None:
    """Why the Triton backend cannot run on `device`, or None. Imports triton only when called."""
    try:
        triton_backend = import_module("rise_kernels.triton_backend")
    except ImportError as error:
        return f"it cannot be imported ({error})"
    return triton_backend.available(device)


def select_backend(name: str, device: torch.device) -> Backend | None:
    """The backend to call; None stands for `reference`, which is plain autograd and no Backend.

    `auto`: triton where it can run on a CUDA device, else chunked. Triton's interpreter must be asked for by name.
    Raises ValueError for an unknown name and RuntimeError where the named backend cannot run.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, found {name!r}")
    if name == "reference":
        return None
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        reason = triton_unavailable(device)
        if reason is None:
            return import_module("rise_kernels.triton_backend").backend
        if name == "triton":
            raise RuntimeError(f"backend: 'triton' cannot run on {device}: {reason}")
    from . import chunked

    return chunked.backend
