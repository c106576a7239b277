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

# An example is slow where other work shares the cores, not where the code is wrong.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# DeepSpeed's operators are compiled once a checkout. In the usual folder, which all environments of a machine share,
# each would build them anew, and a build that was killed leaves a lock for which all wait for ever.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(__file__).parents[1] / "build" / "torch_extensions"))

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
