"""Without a GPU, Triton kernels are interpreted; that is decided before anything imports Triton.

Compiling them needs a process that is not interpreting: tests/test_compile.py starts one.
"""

from __future__ import annotations

import os

import torch  # does not import triton

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
