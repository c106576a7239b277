"""bench/replication.py on the tiny model: stopped, started again, and a table of what is finished."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_goes_on_where_it_was_stopped_and_counts_finished_runs_alone(tiny_config, tmp_path):
    config = tiny_config(evaluation__every=2, checkpoint__every=1)
    page = tmp_path / "page.md"
    command = [sys.executable, "bench/replication.py", "--recipe", str(config), "--steps", "3", "--seeds", "0", "1"]
    command += ["--methods", "rubric", "ruscarl", "--page", str(page), "--set", "guidance.budget_tokens=128"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    runs = tmp_path / "runs"
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        # whatever started the tests in the background may have had SIGINT ignored, which children inherit
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    second = runs / "replication-ruscarl-3-s0" / "evals.jsonl"  # its first line comes before the three steps
    deadline = time.monotonic() + 600
    while not second.exists():
        assert time.monotonic() < deadline, "the second run has not begun"
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    process.communicate(timeout=300)
    assert process.returncode != 0
    first = runs / "replication-rubric-3-s0" / "metrics.jsonl"
    kept = first.read_bytes()
    assert len(kept.splitlines()) == 3
    assert (
        "2 of the planned runs are not finished" in page.read_text()
    )  # rubric is planned for two seeds, ruscarl for one
    assert "| RuscaRL |" not in page.read_text()

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert first.read_bytes() == kept  # not run again
    assert sorted(p.name for p in runs.iterdir() if not p.name.startswith(".")) == [
        "replication-rubric-3-s0",
        "replication-rubric-3-s1",
        "replication-ruscarl-3-s0",
    ]
    ends = []
    for seed in (0, 1):
        lines = (runs / f"replication-rubric-3-s{seed}" / "evals.jsonl").read_text().splitlines()
        ends.append(json.loads(lines[-1])["reward/mean"])
    text = page.read_text()
    mean, deviation = sum(ends) / 2, abs(ends[0] - ends[1]) / 2**0.5
    [row] = [line for line in text.splitlines() if line.startswith("| Rubric-RL | 2 |")]
    assert f"{mean:.3f} +- {deviation:.3f}" in row
    assert "not finished" not in text
    assert text.count("| RuscaRL |") == 2
