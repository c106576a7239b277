"""`import rise_kernels` is light and works without triton; dependencies point one way."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("transformers", "deepspeed", "vllm", "triton", "trl", "liger_kernel", "rise_engine", "rise_rl")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light():
    """Beyond what torch itself loads."""
    loaded = python(
        "import sys, torch; before = set(sys.modules); import rise_kernels\n"
        f"print(*[m for m in sys.modules if m not in before and m.split('.')[0] in {HEAVY!r}])"
    )
    assert loaded.split() == []


def test_works_without_triton():
    """A loss and its gradient with five logits 1, 1, 1, 1, 0; a message where triton is asked for by name."""
    loss, slope, message = python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch, rise_kernels as rk\n"
        "h, w, t = torch.ones(2, 4, requires_grad=True), torch.eye(5, 4), torch.tensor([1, 2])\n"
        "loss = rk.linear_guide_loss(h, w, t, torch.ones(2)).loss\n"
        "loss.backward()\n"
        "print(loss.item(), h.grad[0, 1].item(), sep='\\n')\n"
        "try:\n    rk.linear_logprob(h, w, t, backend='triton')\n"
        "except RuntimeError as error:\n    print(error)\n"
    ).splitlines()
    p = math.e / (4 * math.e + 1)
    assert float(loss) == pytest.approx(2 * math.log((p + 0.1) / p), rel=1e-5)
    assert float(slope) == pytest.approx(-0.1 / (p + 0.1) * (1 - p), rel=1e-5)
    assert message.startswith("backend: 'triton' cannot run on cpu")


def imported(path: Path) -> set[str]:
    """Top-level names of every absolute import in a file, those inside functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize(
    "folder, forbidden",
    [
        ("kernels/rise_kernels", {"rise_engine", "rise_rl", "transformers", "deepspeed", "vllm", "trl"}),
        ("engine/rise_engine", {"rise_rl"}),
    ],
)
def test_dependencies_point_one_way(folder, forbidden):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    wrong = {str(path): names for path in files if (names := imported(path) & forbidden)}
    assert not wrong
