"""The `triton` backend: NVIDIA GPUs of compute capability 8.0 or newer, or Triton's interpreter on a CPU.

docs/kernels.md describes the algorithm; `backend.Backend` is the contract.
"""

from __future__ import annotations

from importlib.metadata import version

import torch
import triton

from .elementary import INTERPRETED
from .host import TritonBackend

backend = TritonBackend()


def interpreter_fault(triton_version: str, numpy_version: str) -> str | None:
    """Triton 3.6's interpreter makes integers of arrays of one element, which numpy 2.4 refuses."""
    triton_minor, numpy_minor = (tuple(map(int, v.split(".")[:2])) for v in (triton_version, numpy_version))
    if triton_minor < (3, 7) and numpy_minor >= (2, 4):
        return f"the interpreter of triton {triton_version} needs numpy below 2.4, found {numpy_version}"
    return None


_INTERPRETER_FAULT = interpreter_fault(triton.__version__, version("numpy")) if INTERPRETED else None


def available(device: torch.device) -> str | None:
    """Why the kernels cannot run on `device`, or None if they can."""
    if INTERPRETED:
        return _INTERPRETER_FAULT
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
