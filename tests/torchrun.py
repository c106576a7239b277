"""Several ranks on this machine's CPU, one thread each, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]


def torchrun(
    *command: Any, ranks: int = 2, timeout: float = 600, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `command` (a script, or -m and a module, with arguments) on `ranks` ranks."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            *map(str, command),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        timeout=timeout,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def results(done: subprocess.CompletedProcess[str]) -> list[Any]:
    """What the ranks printed as JSON behind the word RESULT."""
    return [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")]


def end() -> NoReturn:
    """How a rank's program ends: once all are there, at once. In an ordinary exit gloo's threads of the process groups
    are destroyed while they run, now and then: the process aborts with its work done.
    """
    import torch.distributed as dist

    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
