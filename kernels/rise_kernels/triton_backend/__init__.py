"""The `triton` backend: NVIDIA GPUs of compute capability 8.0 or newer, or Triton's interpreter on a CPU.

docs/kernels.md describes the algorithm; `backend.Backend` is the contract.
"""

from __future__ import annotations

import torch

from .elementary import INTERPRETED
from .host import TritonBackend

backend = TritonBackend()


def available(device: torch.device) -> str | None:
    """Why the kernels cannot run on `device`, or None if they can."""
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return (
            f"Triton has no compiler for {device.type}; set TRITON_INTERPRET=1 before the process starts to interpret"
        )
    if torch.version.hip is not None:
        return "the kernels are written and tested for NVIDIA GPUs, not for ROCm"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"compute capability {major}.{minor} has no bfloat16 matrix instructions; 8.0 is the least"
    return None
