"""bench/loss.py: what a peer that fails, breaks the GPU or is stopped leaves of the others' results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def loss(monkeypatch):
    """The script, whose measurements of a GPU are stubs here."""
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("bench_loss", BENCH / "loss.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module._common, "gc", SimpleNamespace(collect=int))  # takes seconds in a process of many tests
    monkeypatch.setattr(module._common, "synchronize", lambda device: None)
    monkeypatch.setattr(module._common, "launches", lambda step: step() and 1)
    monkeypatch.setattr(module._common, "peak_bytes", lambda step, device: step() and 0)
    return module


def problem_of(loss):
    return loss.Problem.random(8, 4, 11, sequences=2, loss="policy", dtype=torch.float32, device="cpu")


def peer(loss, name, at=None, error=None):
    """A provider that raises `error` in call number `at`."""

    def build(problem):
        step, calls = loss.PROVIDERS[1].build(problem), []

        def counted():
            calls.append(name)
            if len(calls) == at:
                raise error
            return step()

        return counted

    return loss.Provider(name, build, 8)


def floor_and_ours(loss):
    return [p for p in loss.PROVIDERS if p.name in (loss.FLOOR, loss.OURS)]


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
def test_a_peer_that_fails_at_any_call_is_listed_and_the_others_are_timed(loss, at):
    """Calls 1 to 3 are of the check, 4 to 6 beside ours, 7 to 9 with all others."""
    providers = [*floor_and_ours(loss), peer(loss, "bad", at, ValueError("no\nmore")), peer(loss, "good")]
    results = {}
    for _ in loss.measure(providers, problem_of(loss), "cuda", 2, 1, results):
        pass
    assert results["bad"] == {"absent": "fails here: ValueError: no"}
    assert all(len(results[name]["all_seconds"]) == 2 for name in (loss.FLOOR, loss.OURS, "good"))
    median = {name: results[name]["seconds"]["median"] for name in (loss.FLOOR, loss.OURS, "good")}
    assert results["good"]["ratio"] == {k: median["good"] / median[k] for k in (loss.FLOOR, loss.OURS)}


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_peer_that_breaks_the_gpu_ends_the_run_but_takes_nothing_from_those_before_it(monkeypatch, loss, at):
    broken = []

    class Sticky(RuntimeError):
        def __init__(self, text):
            broken.append(True)
            super().__init__(text)

    def step(problem):
        calls = []

        def run():
            calls.append(1)
            if len(calls) == at:
                raise Sticky("an illegal memory access")
            return None, None, None

        return run

    def synchronize(device):
        if broken:
            raise RuntimeError("CUDA error")

    monkeypatch.setattr(loss._common, "synchronize", synchronize)
    providers = [*floor_and_ours(loss), peer(loss, "good"), loss.Provider("bad", step, 8), peer(loss, "later")]
    results = {}
    with pytest.raises(RuntimeError, match="CUDA error"):
        list(loss.measure(providers, problem_of(loss), "cuda", 2, 1, results))
    assert set(results["good"]["ratio"]) == {loss.FLOOR, loss.OURS}
    assert results["bad"] == {"absent": "fails here: Sticky: an illegal memory access"}
    assert results["later"] == {"absent": "not reached"}


@pytest.mark.parametrize("how", ["stopped", "stopped at the end", "broken"])
def test_a_run_that_ends_early_has_written_what_was_timed(monkeypatch, loss, tmp_path, capsys, how):
    file, seen, drawn, broken = tmp_path / "loss.json", [], [], []

    def synchronize(device):
        if broken:
            raise RuntimeError("CUDA error")

    def build(problem):
        """At this moment a SIGKILL would leave `seen`."""
        seen.append(json.loads(file.read_text())["results"])
        if how == "broken":
            broken.append(True)
            raise ValueError("an illegal memory access")
        at = 1 if how == "stopped" else 8
        return peer(loss, "bad", at, KeyboardInterrupt()).build(problem)

    problem = problem_of(loss)
    providers = (*floor_and_ours(loss), peer(loss, "good"), loss.Provider("bad", build, 8), peer(loss, "later"))
    monkeypatch.setattr(loss.Problem, "random", lambda *args, **keywords: problem)
    monkeypatch.setattr(loss._common, "environment", lambda device: {"device": device, "threads": 1, "torch": ""})
    monkeypatch.setattr(loss._common, "synchronize", synchronize)
    monkeypatch.setattr(loss, "plot", lambda results, title, path: drawn.append(path.name))
    monkeypatch.setattr(loss, "PROVIDERS", providers)
    monkeypatch.setattr(loss, "GPU_PROVIDERS", ())
    monkeypatch.setattr(loss.signal, "signal", lambda *args: None)
    monkeypatch.setattr("sys.argv", ["loss.py", "--device", "cuda", "--rounds", "2", "--out", str(tmp_path)])
    with pytest.raises(RuntimeError if how == "broken" else KeyboardInterrupt):
        loss.main()

    written = json.loads(file.read_text())["results"]
    timed = [[name for name, row in rows.items() if "seconds" in row] for rows in (*seen, written)]
    first = [loss.FLOOR, loss.OURS, "good"]
    assert timed == [first, [*first, "bad", "later"] if how == "stopped at the end" else first]
    assert ("illegal" in written["bad"].get("absent", "")) == (how == "broken")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.json"]
    assert drawn == ["loss.png"]
    assert "x floor" in capsys.readouterr().out


def test_a_failure_of_ours_shows_in_the_status_and_named_providers_run_beside_the_floor(monkeypatch, loss):
    chosen = []

    def run(args, n, name, providers):
        chosen.extend(p.name for p in providers)
        return {"rise triton": {"absent": "fails here: CompilationError: "}, "liger grpo": {"absent": "fails here: "}}

    monkeypatch.setattr(loss, "run", run)
    monkeypatch.setattr(loss.signal, "signal", lambda *args: None)
    monkeypatch.setattr("sys.argv", ["loss.py", "--device", "cpu", "--providers", "liger grpo"])
    with pytest.raises(SystemExit, match=r"failed: rise triton$"):
        loss.main()
    assert chosen == [loss.FLOOR, loss.EAGER, loss.OURS, loss.TRITON, "liger grpo"]
