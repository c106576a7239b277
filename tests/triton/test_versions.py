"""What a version cannot do is refused by name."""

from __future__ import annotations

import pytest
import torch

import rise_kernels
from rise_kernels import triton_backend


@pytest.mark.parametrize(
    "triton_version, numpy_version, refused",
    [("3.6.0", "2.4.6", True), ("3.6.0", "2.3.5", False), ("3.7.1", "2.4.6", False), ("3.10.0", "2.10.0", False)],
)
def test_numpy_that_the_interpreter_fails_under(monkeypatch, triton_version, numpy_version, refused):
    fault = triton_backend.interpreter_fault(triton_version, numpy_version)
    assert (fault is not None) == refused
    if refused:
        monkeypatch.setattr(triton_backend, "INTERPRETED", True)
        monkeypatch.setattr(triton_backend, "_INTERPRETER_FAULT", fault)
        with pytest.raises(
            RuntimeError, match=r"'triton' cannot run on cpu: .* 3\.6\.0 needs numpy below 2\.4, found 2\.4\.6"
        ):
            rise_kernels.linear_logprob(torch.ones(2, 4), torch.ones(5, 4), torch.tensor([1, 2]), backend="triton")
