"""Time of one training step on recorded rollouts, ours beside TRL's GRPOTrainer, interleaved in one process.

    python bench/step.py                      # CPU: two small models, prompt:response 1:8, 1:2 and 2:1, groups of 8
    python bench/step.py --models deep --shapes 96:192 --rounds 7
    python bench/step.py --models qwen3-4b --shapes 1024:4096 --dtype bfloat16 --checkpointing --budget 32768   # a GPU

Both do the same work (bench/_training.py) and must report the same gradient norm. Each round runs every contender
once, in an order that rotates; the ratio is TRL's median over ours. TRL runs at each of --trl-batch sequences per
forward pass and its fastest counts. CPU seconds (all threads) are given beside wall seconds: on a disturbed machine
they are the steadier of the two. `wide` has Qwen3's vocabulary on two layers of width 512, so that the head is nearly
everything; `deep` has 12 layers and a vocabulary of 8,192, so that the head is as small a part as in Qwen3-4B.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import _common
from _training import QWEN3_4B, Recorded, Work, dump, load, ours, quiet, trl, write_model

MODELS = {
    "wide": Work(),
    "deep": Work(vocab_size=8192, num_hidden_layers=12),
    "qwen3-4b": Work(**QWEN3_4B),
}
OURS = "rise"


def measure(work: Work, folder: Path, batches: list[int], rounds: int, warmup: int) -> dict[str, dict[str, Any]]:
    recorded = Recorded.draw(work)
    # TRL first: it must not find our process group, or it wraps its model in DDP.
    steps = {
        f"trl, {b} a pass": trl(replace(work, trl_batch=b), folder, recorded, rounds + warmup)
        for b in batches
        if (work.prompts * work.group) % b == 0
    }
    steps[OURS] = ours(work, folder, recorded)
    names = list(steps)
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "cpu_seconds": [], "norms": []} for name in names}
    for number in range(warmup + rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            cpu = time.process_time()
            seconds, norm = steps[name].step()
            cpu = time.process_time() - cpu
            found[name]["norms"].append(norm)
            if number >= warmup:
                found[name]["seconds"].append(seconds)
                found[name]["cpu_seconds"].append(cpu)
    for number, norms in enumerate(zip(*(row["norms"] for row in found.values()))):
        if max(norms) - min(norms) > 2e-3 * max(norms) + (0.02 * max(norms) if work.dtype == "bfloat16" else 0.0):
            raise RuntimeError(f"step {number}: the gradient norms differ: {dict(zip(found, norms))}")
    for row in found.values():
        row["median"], row["cpu_median"] = statistics.median(row["seconds"]), statistics.median(row["cpu_seconds"])
    return found


def ratios(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """TRL's best over ours: above 1, ours is faster."""
    rivals = [row for name, row in found.items() if name != OURS]
    return {key: min(r[key] for r in rivals) / found[OURS][key] for key in ("median", "cpu_median")}


def fresh(work: Work, batches: list[int], rounds: int, warmup: int, threads: int) -> dict[str, dict[str, Any]]:
    """`measure` in a process of its own: TRL must not find the process group that ours leaves behind."""
    with tempfile.TemporaryDirectory() as folder:
        order = {"work": dump(work), "folder": folder, "batches": batches, "rounds": rounds, "warmup": warmup}
        write_model(work, Path(folder))
        command = [sys.executable, __file__, "--worker", json.dumps(order), "--threads", str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the measuring process failed:\n{done.stderr[-3000:]}")
        return json.loads((Path(folder) / "measured.json").read_text())


def worker(order: dict[str, Any]) -> None:
    folder = Path(order["folder"])
    found = measure(load(order["work"]), folder, order["batches"], order["rounds"], order["warmup"])
    (folder / "measured.json").write_text(json.dumps(found))
    os._exit(0)  # TRL's thread is still about: an ordinary exit would wait for it, or abort


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["wide", "deep"])
    parser.add_argument("--shapes", nargs="+", default=["16:128", "48:96", "96:48"], help="prompt:response tokens")
    parser.add_argument("--group", type=int, default=8, help="responses that share a prompt")
    parser.add_argument("--prompts", type=int, default=1, help="prompts of a step")
    parser.add_argument("--budget", type=int, default=16384, help="our tokens per forward pass")
    parser.add_argument("--trl-batch", type=int, nargs="+", default=[8], help="TRL's sequences per forward pass")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing in both")
    parser.add_argument("--no-compact", action="store_true", help="TRL as it comes on a CPU: prompt tokens scored too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="folder for the JSON (default: bench/results/<device>)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    quiet()
    if args.worker:
        worker(json.loads(args.worker))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = _common.environment(device)
    print(f"one training step, {where['device']}, {where['threads']} threads, torch {where['torch']}", flush=True)
    rows, results = [], []
    for model in args.models:
        for shape in args.shapes:
            prompt, response = map(int, shape.split(":"))
            work = replace(
                MODELS[model],
                prompt=prompt,
                response=response,
                group=args.group,
                prompts=args.prompts,
                micro_batch=args.budget,
                checkpointing=args.checkpointing,
                dtype=args.dtype,
                trl_compact=not args.no_compact,
            )
            found = fresh(work, args.trl_batch, args.rounds, args.warmup, args.threads)
            ratio = ratios(found)
            results.append({"model": model, "prompt": prompt, "response": response, "ratio": ratio, "steps": found})
            for name, row in found.items():
                won = f"{ratio['median']:.2f} ({ratio['cpu_median']:.2f} CPU)" if name == OURS else ""
                cells = [f"{row['median']:.2f}", f"{row['cpu_median']:.2f}", f"{row['norms'][-1]:.5g}", won]
                rows.append([f"{model} {args.group} x {shape}", name, *cells])
            print(f"  {model} {shape}: {ratio['median']:.2f} x (CPU seconds {ratio['cpu_median']:.2f} x)", flush=True)
    _common.print_table(["step", "trainer", "wall s", "CPU s", "gradient norm", "TRL's best / ours"], rows)
    target = (args.out or _common.ROOT / "results" / device) / "step.json"
    setting = {k: v for k, v in vars(args).items() if k not in ("out", "worker")}
    _common.write_results(target, {"setting": setting, "environment": where, "results": results})
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
