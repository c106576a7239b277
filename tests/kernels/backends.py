"""The backends every kernel test runs on. This is the one place to add another."""

from __future__ import annotations

import pytest

TRITON = pytest.param("triton", marks=pytest.mark.slow)  # interpreted where there is no GPU
BACKENDS = ["reference", "chunked", TRITON]
BOUNDED = ["chunked", TRITON]  # those with a byte budget

# What a backend may be off by, against float64 with float32 inputs.
LOGPROB_ATOL = 2e-5
GRAD_RTOL = 1e-4
