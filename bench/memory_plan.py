"""The memory plan's peak against the measured one: a training step of Qwen3-shaped models, each in a fresh process.

    python bench/memory_plan.py                    # every case on one rank; about 4 minutes on two cores
    python bench/memory_plan.py --cases stage2-bf16-2ranks stage3-bf16-2ranks    # launched with torchrun

Measured: the most bytes that tensors held at once during the second step, from every allocation and release that
torch's CPU allocator (mapped weight files included) reports from the first moment of the process on: what a GPU's
allocator would hold too. Resident memory is printed beside it; it lacks what is allocated and never written, such as
most of DeepSpeed's buckets, and has code, scratch space of the BLAS and the records of this measurement on top.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
sys.path.insert(0, str(Path(__file__).parent))

# engine: EngineConfig's keys. prompt, response, group: of the one prompt that is trained on.
LARGE_BUCKET = {"zero_optimization": {"reduce_bucket_size": 500_000_000}}  # DeepSpeed's own
OFFLOAD = {"optimizer": True, "pin_memory": False}
CASES: dict[str, dict[str, Any]] = {
    "stage0": {
        "shape": {"tie_word_embeddings": False, "num_hidden_layers": 6},
        "engine": {"micro_batch_tokens": 2048},
        "prompt": 1536,
        "response": 64,
        "group": 16,
    },
    "stage0-checkpointing": {
        "shape": {"tie_word_embeddings": False, "num_hidden_layers": 6},
        "engine": {"micro_batch_tokens": 2048, "activation_checkpointing": True},
        "prompt": 1536,
        "response": 48,
        "group": 16,
    },
    "stage0-checkpointing-wide": {
        "shape": {"vocab_size": 8192, "intermediate_size": 24576},
        "engine": {"micro_batch_tokens": 4096, "activation_checkpointing": True},
        "prompt": 1024,
        "response": 64,
        "group": 48,
    },
    "stage0-tied-long": {
        "shape": {"num_hidden_layers": 6},
        "engine": {"micro_batch_tokens": 4096},
        "prompt": 3584,
        "response": 128,
        "group": 4,
    },
    "stage1": {
        "shape": {"tie_word_embeddings": False},
        "engine": {"zero_stage": 1, "micro_batch_tokens": 512},
        "prompt": 256,
        "response": 64,
        "group": 8,
    },
    "stage2": {
        "shape": {"tie_word_embeddings": False},
        "engine": {"zero_stage": 2, "micro_batch_tokens": 512},
        "prompt": 256,
        "response": 64,
        "group": 8,
    },
    "stage2-bf16": {
        "shape": {"tie_word_embeddings": False},
        "engine": {"zero_stage": 2, "dtype": "bfloat16", "micro_batch_tokens": 256, "deepspeed": LARGE_BUCKET},
        "prompt": 128,
        "response": 32,
        "group": 8,
    },
    "stage2-bf16-small-bucket": {
        "shape": {"tie_word_embeddings": False},
        "engine": {"zero_stage": 2, "dtype": "bfloat16", "micro_batch_tokens": 256},
        "prompt": 128,
        "response": 32,
        "group": 8,
    },
    "stage3-bf16": {
        "shape": {"tie_word_embeddings": False},
        "engine": {"zero_stage": 3, "dtype": "bfloat16", "micro_batch_tokens": 256},
        "prompt": 128,
        "response": 32,
        "group": 8,
    },
    "lora": {
        "shape": {"num_hidden_layers": 6},
        "engine": {"micro_batch_tokens": 6144, "lora": {"rank": 32}},
        "prompt": 5632,
        "response": 128,
        "group": 4,
    },
    "stage2-bf16-offload": {
        "shape": {"tie_word_embeddings": False},
        "engine": {"zero_stage": 2, "dtype": "bfloat16", "micro_batch_tokens": 256, "offload": OFFLOAD},
        "prompt": 128,
        "response": 32,
        "group": 8,
    },
    "stage2-bf16-2ranks": {
        "ranks": 2,
        "shape": {"tie_word_embeddings": False, "hidden_size": 768},
        "engine": {"zero_stage": 2, "dtype": "bfloat16", "micro_batch_tokens": 256},
        "prompt": 128,
        "response": 32,
        "group": 8,
    },
    "stage3-bf16-2ranks": {
        "ranks": 2,
        "shape": {"tie_word_embeddings": False, "hidden_size": 768},
        "engine": {"zero_stage": 3, "dtype": "bfloat16", "micro_batch_tokens": 256},
        "prompt": 128,
        "response": 32,
        "group": 8,
    },
}
STEPS = 2


def measure(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """In a process that has done nothing yet. {predicted, measured, resident: bytes; phase; phases}."""
    import torch
    from _common import status_bytes
    from _training import Recorded, Work, quiet

    from rise_engine.config import EngineConfig
    from rise_engine.memory_plan import ModelShape, Workload, plan_memory
    from rise_engine.plan_settings import setting_of
    from rise_engine.policy import PolicyEngine
    from rise_engine.sequences import TrainSequence

    quiet()
    work = Work(**case["shape"], prompt=case["prompt"], response=case["response"], group=case["group"])
    config = EngineConfig(**case["engine"])
    drawn = Recorded.draw(work)
    sequences = [
        TrainSequence("0", tuple(drawn.prompts[0]), tuple(r), 1e-3, (-1.0) ** i)
        for i, r in enumerate(drawn.responses[0])
    ]
    before = status_bytes("VmRSS")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        policy = PolicyEngine(folder, config)
        for i in range(STEPS):
            with torch.profiler.record_function(f"step {i}"):
                stats = policy.train_step(sequences, temperature=1.0)
    resident = status_bytes("VmHWM") - before
    events = profiler.profiler.kineto_results.events()
    last = next(e for e in events if e.name() == f"step {STEPS - 1}")
    now = measured = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        if last.start_ns() <= event.start_ns() <= last.end_ns():
            measured = max(measured, now)

    shape = ModelShape.from_config(json.loads((folder / "config.json").read_text()))
    load = Workload(
        prompt=case["prompt"],
        response=case["response"],
        group=case["group"],
        micro_batch=config.micro_batch_tokens,
        packed=policy.layout == "shared_prompt",
        several=stats.micro_batches > 1,
        rows=0,
    )
    plan = plan_memory(shape, load, setting_of(config, ranks=policy.world_size, on_cpu=True))
    return {
        "predicted": plan.peak,
        "measured": measured,
        "resident": resident,
        "phase": plan.peak_phase,
        "phases": {phase: plan.total(phase) for phase in plan.phases},
        "seconds": stats.seconds,
    }


def run(name: str) -> dict[str, Any]:
    """Measures one case in a fresh process (one per rank; the first rank's figures)."""
    from _training import Work, write_model

    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Work(**case["shape"]), Path(folder))
        worker = [__file__, "--worker", name, "--folder", folder]
        if case.get("ranks", 1) > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case['ranks']}"]
            worker = [*launcher, *worker]
        done = subprocess.run([sys.executable, *worker], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr[-3000:]}")
        return json.loads((Path(folder) / "measured.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one_rank = [name for name, case in CASES.items() if case.get("ranks", 1) == 1]
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=one_rank)
    parser.add_argument("--out", type=Path, help="folder for the JSON (default: bench/results/cpu)")
    parser.add_argument("--worker", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        found = measure(CASES[args.worker], args.folder)
        if os.environ.get("RANK", "0") == "0":
            (args.folder / "measured.json").write_text(json.dumps(found))
        return
    import _common

    rows, results = [], {}
    for name in args.cases:
        found = results[name] = run(name)
        gib = [f"{found[key] / 2**30:.2f}" for key in ("predicted", "measured", "resident")]
        rows.append([name, *gib, f"{found['predicted'] / found['measured'] - 1:+.1%}", found["phase"]])
        print("  " + "  ".join(rows[-1]), flush=True)
    header = ["case", "planned GiB", "measured GiB", "resident GiB", "error", "planned peak"]
    _common.print_table(header, rows)
    folder = args.out or _common.ROOT / "results" / "cpu"
    _common.write_results(folder / "memory_plan.json", {"environment": _common.environment("cpu"), "results": results})
    print(f"wrote {folder}/memory_plan.json")


if __name__ == "__main__":
    main()
