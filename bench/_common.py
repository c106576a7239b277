"""What the benchmarks share: interleaved timing, peak memory, and where results go."""

from __future__ import annotations

import gc
import json
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rise_rl.files import write_aside

ROOT = Path(__file__).parent


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def interleaved_times(
    steps: Mapping[str, Callable[[], Any]], *, rounds: int, warmup: int, device: str
) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds of every step in every round. All steps run in each round, in an order that rotates, so that
    a disturbance of the machine meets all of them alike; CPU seconds (over all threads) tell how much it was disturbed.
    """
    names = list(steps)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            gc.collect()
            synchronize(device)
            start, cpu_start = time.perf_counter(), time.process_time()
            steps[name]()
            synchronize(device)
            if number >= warmup:
                times[name].append((time.perf_counter() - start, time.process_time() - cpu_start))
    return times


def quantiles(values: list[float]) -> dict[str, float]:
    """Median, p20 and p80."""
    p20, median, p80 = torch.quantile(
        torch.tensor(values, dtype=torch.float64), torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    ).tolist()
    return {"median": median, "p20": p20, "p80": p80}


def peak_bytes(step: Callable[[], Any], device: str) -> int:
    """The most bytes that `step` holds at once beyond what was allocated before it, its results included.

    CUDA: the caching allocator's own peak. CPU: every allocation and release that torch's allocator reports to the
    profiler, temporaries inside operations and compiled code included (the scratch space of the BLAS is not).
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del result
        return peak
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = step()
    del result
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def launches(step: Callable[[], Any]) -> int:
    """Kernels that one step starts on the GPU; copies, fills and the ranges that compiled code marks are none."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return sum(
        e.device_type() == cuda and not e.is_user_annotation() and not e.name().startswith(("Memcpy", "Memset"))
        for e in profiler.profiler.kineto_results.events()
    )


def resident_peak_bytes(step: Callable[[], Any]) -> int | None:
    """The same for the process's resident memory, from the kernel's high-water mark: a coarse check of the above.

    Linux only; None where the mark cannot be reset.
    """
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None

    before = status_bytes("VmRSS")
    result = step()
    peak = status_bytes("VmHWM") - before
    del result
    return peak


def status_bytes(key: str) -> int:
    """A size of this process from /proc/self/status: VmRSS (now), VmHWM (its peak). Linux only."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) << 10
    raise LookupError(key)


def environment(device: str) -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = f"{names[0]} x {len(names)}" if names else cpu
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write_results(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_aside(path, json.dumps(results, indent=2) + "\n")


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """First column left, the rest right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * w for w in widths], *rows]:
        print("  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))]))
