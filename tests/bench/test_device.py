"""bench/device.sh with a Python that only writes down what it is asked: which measurements a call makes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE = """#!/usr/bin/env bash
[ "$1" = -c ] && { echo gpu; exit; }
echo "$*" >> asked
case "$*" in
*qwen3-14b\\ *) exit 1 ;;
*"$SLOW"*) sleep 30 ;;
esac
"""


@pytest.fixture
def tree(tmp_path):
    """A checkout with two Pythons: the environment's, which fails, and the fake."""
    (tmp_path / "bench").mkdir()
    shutil.copy(ROOT / "bench" / "device.sh", tmp_path / "bench")
    shutil.copy(ROOT / ".gitignore", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, text in ((".venv/bin/python", "#!/usr/bin/env bash\nexit 3\n"), ("fake", FAKE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def call(tree, *, slow="nothing", edit=("", "")):
    """(asked, missed, failed) of one call: names of measurements."""
    script = tree / "bench" / "device.sh"
    script.write_text((ROOT / "bench" / "device.sh").read_text().replace(*edit))
    (tree / "asked").write_text("")
    environment = {**os.environ, "PYTHON": str(tree / "fake"), "SLOW": slow}
    run = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, timeout=60)
    names = [line.split("--name ")[1].split()[0] if "--name" in line else Path(line).stem
             for line in (tree / "asked").read_text().splitlines()]  # fmt: skip
    lists = {line.split(":")[0].split(",")[0].split(" (")[0]: line.split(": ")[1].split()
             for line in run.stdout.splitlines() if ": " in line and not line.startswith("==")}  # fmt: skip
    failed = lists.get("failed or stopped", [])
    assert run.returncode == bool(failed), run.stderr
    return names, lists.get("not reached", []), failed


def test_each_measurement_is_done_once_and_what_failed_is_not_tried_again(tree):
    asked, missed, failed = call(tree)
    assert asked[:3] == ["qwen3-4b", "test_paths", "test_gradient_error"]
    assert (len(asked), missed, failed) == (13, [], ["qwen3-14b"])
    assert call(tree) == ([], [], ["qwen3-14b"])
    (tree / "bench/results/gpu/qwen3-14b.failed.txt").unlink()
    assert call(tree) == (["qwen3-14b"], [], ["qwen3-14b"])


def test_what_is_left_behind_can_be_committed(tree):
    call(tree)
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    listed = subprocess.run(
        ["git", "-C", str(tree), "ls-files", "--others", "--exclude-standard", "bench/results"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    found = [str(path.relative_to(tree)) for path in (tree / "bench" / "results").rglob("*") if path.is_file()]
    assert sorted(listed) == sorted(found)
    assert len(found) == 14  # and gpu.txt
    assert not any(path.endswith(".partial") for path in found)


@pytest.mark.slow
def test_one_that_had_all_its_time_does_not_come_again_and_one_that_had_less_does(tree):
    _, missed, failed = call(tree, slow="test_paths", edit=("each=200", "each=2"))
    assert (missed, failed) == ([], ["test-paths", "qwen3-14b"])

    shutil.rmtree(tree / "bench" / "results")
    short = ("least=30", "least=1; limit=13")  # of which 10 are kept for what a stopped one writes
    asked, missed, failed = call(tree, slow="--name qwen3-4b ", edit=short)
    assert asked == ["qwen3-4b"]
    assert (missed[0], len(missed), failed) == ("qwen3-4b", 13, [])
    assert [path.name for path in (tree / "bench/results/gpu").iterdir()] == ["gpu.txt"]
    assert call(tree)[0][0] == "qwen3-4b"


def test_no_gpu(tree):
    (tree / "fake").write_text("#!/usr/bin/env bash\nexit 1\n")
    run = subprocess.run(
        ["bash", "bench/device.sh"], cwd=tree, env={**os.environ, "PYTHON": str(tree / "fake")},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 1
    assert "no CUDA device" in run.stderr
