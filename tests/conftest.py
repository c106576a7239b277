"""Without a GPU, Triton kernels are interpreted; that is decided before anything imports Triton.

Compiling them needs a process that is not interpreting: tests/test_compile.py starts one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch  # does not import triton
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# An example is slow where other work shares the cores, not where the code is wrong; and what fails, fails again.
settings.register_profile("any machine", deadline=None, derandomize=True)
settings.load_profile("any machine")

# What is compiled or downloaded lies in the checkout and goes with it. DeepSpeed's operators above all: in the usual
# folder, which all environments of a machine share, a build that was killed leaves a lock for which all wait for ever.
BUILD = Path(__file__).parents[1] / "build"
for name in ("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "RISE_RL_CACHE"):
    os.environ.setdefault(name, str(BUILD / name.removesuffix("_DIR").lower()))

# Judges are asked on this machine, and what is printed is compared as plain text.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "COLUMNS"):
    os.environ.pop(name, None)

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher():
    """DeepSpeed and accelerate leave a launcher's variables behind in the process; whatever a later test starts would
    take itself for a rank of theirs.
    """
    forget_launcher()
    yield
    forget_launcher()


def forget_launcher() -> None:
    for name in LAUNCHER:
        os.environ.pop(name, None)


def pytest_unconfigure() -> None:
    """gloo's threads must not outlive the interpreter: now and then that aborts a process whose tests all passed."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
