"""Every Triton kernel compiles ahead of time, for every architecture and candidate tile, and to what it is meant to.

The compiler runs in a process of its own, because this one may be interpreting the kernels (tests/conftest.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

LIMIT = 60  # compilations: each takes seconds where Triton's cache is cold


@pytest.fixture(scope="module")
def reports():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "rise_kernels.inspect", "--json"],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def label(report):
    return f"{report['kernel']} {report['variant']} sm_{report['arch']} {report['dtype']} {report['tile']}"


def is_gemm(report):
    return report["kernel"] in ("forward", "backward")


def test_everything_compiles_for_every_architecture(reports):
    assert len(reports) <= LIMIT
    for arch in (80, 90, 100):
        kernels = {r["kernel"] for r in reports if r["arch"] == arch}
        assert kernels == {"forward", "backward", "statistics", "loss", "dlogits"}


def test_nothing_spills(reports):
    """Stack bytes are registers that went to memory."""
    assert not [label(r) for r in reports if r["stack"]]


def test_shared_memory_fits(reports):
    limit = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
    assert not [label(r) for r in reports if r["shared"] > limit[r["arch"]]]


def test_16_bit_products_use_the_matrix_instructions_of_the_architecture(reports):
    for instruction, arch in (("mma", 80), ("wgmma", 90), ("tcgen05", 100)):
        products = [r for r in reports if is_gemm(r) and r["arch"] == arch and r["dtype"] != "fp32"]
        assert products
        assert not [label(r) for r in products if r[instruction] == 0]


def test_float32_products_are_not_rounded_to_tf32(reports):
    """TF32 would show as a matrix instruction; IEEE float32 has none."""
    products = [r for r in reports if is_gemm(r) and r["dtype"] == "fp32"]
    assert products
    assert not [label(r) for r in products if r["mma"] or r["wgmma"] or r["tcgen05"]]
