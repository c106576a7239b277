"""Every Triton kernel compiles ahead of time, for every architecture and candidate tile, and to what it is meant to.

The compiler runs in a process of its own, because this one may be interpreting the kernels (tests/conftest.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from rise_kernels.inspect import jobs
from rise_kernels.token_losses import GuideKind, KlEstimator

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
LIMIT = 54  # compilations, and 6 for the launches: each takes seconds where Triton's cache is cold


def run(*arguments):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-W", "ignore", *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def reports():
    return json.loads(run("-m", "rise_kernels.inspect", "--json"))


def label(report):
    return f"{report['kernel']} {report['variant']} sm_{report['arch']} {report['dtype']} {report['tile']}"


def is_gemm(report):
    return report["kernel"] in ("forward", "backward")


def test_everything_compiles_for_every_architecture(reports):
    assert len(reports) <= LIMIT
    for arch in (80, 90, 100):
        kernels = {r["kernel"] for r in reports if r["arch"] == arch}
        assert kernels == {"forward", "backward", "statistics", "loss", "dlogits"}


def test_the_row_kernel_compiles_with_every_choice_that_a_caller_has():
    """On sm_90: both losses' kinds, every KL estimator, and every flag on and off (tests/triton runs them all)."""
    variants = [job.constants for job in jobs((90,)) if job.kernel == "loss"]
    seen = {name: {constants[name] for constants in variants} for name in variants[0]}
    assert seen.pop("KL_ESTIMATOR") == set(get_args(KlEstimator))
    assert seen.pop("GUIDE") == set(get_args(GuideKind))
    flags = {name: values for name, values in seen.items() if not name.startswith("BLOCK")}
    assert len(flags) == 8
    assert all(values == {False, True} for values in flags.values()), flags


def test_nothing_spills(reports):
    """Stack bytes are registers that went to memory."""
    assert not [label(r) for r in reports if r["stack"]]


def test_shared_memory_fits(reports):
    """The tiles of 8.0 also serve 8.6, 8.9 and 12.0, which have 99 KiB."""
    limit = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
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


def test_kernels_compile_as_they_are_launched():
    """From the public functions through descriptors and tuning to the compiler: everything but the run itself. Neither
    one row at a time, which begins at any address, nor a slab of the vocabulary is compiled anew.
    """
    launched = [line.split() for line in run(str(ROOT / "tests" / "triton" / "launch_without_gpu.py")).splitlines()]
    kernels = Counter(kernel for kernel, _ in launched)
    assert kernels["backward_kernel"] > kernels["statistics_kernel"] > 1
    assert Counter(kernel for kernel, _ in {(kernel, binary) for kernel, binary in launched}) == {
        "forward_kernel": 2,
        "loss_kernel": 1,
        "dlogits_kernel": 1,
        "statistics_kernel": 1,
        "backward_kernel": 1,
    }
