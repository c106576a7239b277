"""Tests that run on a GPU there see the memory layouts that they were written for."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.layouts import LAYOUTS, every_second, laid_out, on_device


@pytest.mark.parametrize("layout", [*LAYOUTS, "vector"])
def test_a_copy_keeps_strides_and_offset(layout):
    x = torch.arange(12.0).reshape(3, 4)
    x = every_second(x[1]) if layout == "vector" else laid_out(x, layout)
    copy = on_device(x, "meta")
    assert copy.is_meta
    assert copy.shape == x.shape
    assert copy.stride() == x.stride()
    assert copy.storage_offset() == x.storage_offset()
    assert torch.equal(on_device(x, "cpu"), x)
    assert on_device(x[:0], "meta").shape == x[:0].shape
