"""How much memory the process has needed."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory_gib() -> float:
    """Peak since the process began, in GiB: allocated device memory on a GPU, resident memory on a CPU.

    What vLLM holds on the GPU counts as allocated also while it sleeps: torch does not see that its pool is unmapped.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
