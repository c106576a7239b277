"""Peak memory and time of one training step against response length, ours beside TRL's GRPOTrainer.

    python bench/memory_8k.py                                # CPU: D=512, 2 layers, V=151,936, float32; 7 minutes
    python bench/memory_8k.py --lengths 1024 8192 --group 4  # more responses a prompt
    python bench/memory_8k.py --model qwen3-4b --dtype bfloat16 --checkpointing --group 8      # a GPU

A step is an optimizer update on one prompt and its recorded responses (bench/_training.py: same model, ids, rewards
and work). Every trainer and length has a process of its own: two warm-up steps at 64 tokens, in which the optimizer
makes its state, then one measured step. Peak: of resident memory during that step, over what the process held before it
had a model (on a GPU: of allocated memory). "above rest": over what it held between steps: parameters and optimizer
state, which both trainers hold alike. "head": measured apart, a forward and backward pass of the head alone on as many
rows as the step scores at once: the peak of live tensors beyond inputs and returned gradients; beside it what float32
logits and their gradient would take. Both trainers forward one response at a time, which leaves them most room. CPU
seconds (all threads) are the steadier of the two on a disturbed machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
sys.path.insert(0, str(Path(__file__).parent))
import _common
from _training import QWEN3_4B, Recorded, Work, dump, load, ours, quiet, trl, write_model

MODELS = {"small": Work(), "qwen3-4b": Work(**QWEN3_4B)}
CONTENDERS = ("rise", "trl")
WARMUP = 64
GIB = 2**30


def held() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else _common.status_bytes("VmRSS")


def reset_peak() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _common.status_bytes("VmHWM")


def measure(work: Work, contender: str, folder: Path) -> dict[str, float]:
    """One contender at one length, in a process that has done nothing yet."""
    quiet()
    drawn = Recorded.draw(work)
    short = Recorded(drawn.prompts, [[r[:WARMUP] for r in group] for group in drawn.responses], drawn.rewards)
    build = {"rise": ours, "trl": lambda *args: trl(*args, 3)}[contender]
    before = held()
    trainer = build(work, folder, short)
    for _ in range(2):
        trainer.step()
    trainer.use(drawn)
    at_rest = held() - before
    reset_peak()
    cpu = time.process_time()
    seconds, norm = trainer.step()
    cpu = time.process_time() - cpu
    return {"peak": peak() - before, "at_rest": at_rest, "seconds": seconds, "cpu_seconds": cpu, "norm": norm}


def head_memory(work: Work, rows: int) -> dict[str, int]:
    """Of one forward and backward pass of the head on `rows` rows: bytes beyond inputs and returned gradients."""
    from rise_kernels import linear_policy_loss

    quiet()
    device, dtype = work.device, getattr(torch, work.dtype)
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, work.hidden_size, generator=g).to(device, dtype).requires_grad_()
    weight = (torch.randn(work.vocab_size, work.hidden_size, generator=g) * 0.02).to(device, dtype).requires_grad_()
    target = torch.randint(0, work.vocab_size, (rows,), generator=g).to(device)
    share = torch.full((rows,), 1.0 / rows, device=device)
    advantage = torch.ones(rows, device=device)

    def forward_backward() -> None:
        linear_policy_loss(hidden, weight, target, share, advantage).loss.backward()

    extra = _common.peak_bytes(forward_backward, device) - hidden.nbytes - weight.nbytes
    return {"extra": extra, "full_logits": 2 * 4 * rows * work.vocab_size}


def fresh(order: dict[str, Any], folder: Path, threads: int) -> dict[str, Any]:
    """The answer of a worker process."""
    command = [sys.executable, __file__, "--worker", json.dumps(order), "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the measuring process failed:\n{done.stderr[-3000:]}")
    return json.loads((folder / "measured.json").read_text())


def worker(order: dict[str, Any]) -> None:
    work, folder = load(order["work"]), Path(order["folder"])
    found = head_memory(work, order["rows"]) if "rows" in order else measure(work, order["contender"], folder)
    (folder / "measured.json").write_text(json.dumps(found))
    os._exit(0)  # TRL's thread is still about: an ordinary exit would wait for it, or abort


def plot(results: list[dict[str, Any]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (memory, clock) = plt.subplots(1, 2, figsize=(9, 3.6))
    lengths = [row["response"] for row in results]
    for contender in CONTENDERS:
        memory.plot(lengths, [row[contender]["peak"] / GIB for row in results], "o-", label=contender)
        clock.plot(lengths, [row[contender]["seconds"] for row in results], "o-", label=contender)
    logits = [(row["rise"]["peak"] + row["head"]["full_logits"]) / GIB for row in results]
    memory.plot(lengths, logits, "--", color="grey", label="rise + full float32 logits and gradient")
    memory.set_ylabel("peak GiB of a step")
    clock.set_ylabel("seconds of a step")
    for axes in (memory, clock):
        axes.set_xlabel("tokens of a response")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192], help="tokens of a response")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--group", type=int, default=2, help="responses of the prompt")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing in both")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="folder for JSON and plot (default: bench/results/<device>)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.worker:
        worker(json.loads(args.worker))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = _common.environment(device)
    base = replace(
        MODELS[args.model],
        prompt=args.prompt,
        group=args.group,
        dtype=args.dtype,
        checkpointing=args.checkpointing,
        micro_batch=1,  # a sequence longer than the budget is alone
    )
    title = (
        f"one step, {args.group} responses to a prompt of {args.prompt}, D={base.hidden_size}, "
        f"{base.num_hidden_layers} layers, V={base.vocab_size}, {args.dtype}, {where['device']}"
    )
    print(f"{title}, {where['threads']} threads, torch {where['torch']}", flush=True)
    rows, results = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(base, Path(name))
        for length in args.lengths:
            work = replace(base, response=length)
            shared = {"work": dump(work), "folder": name}
            found: dict[str, Any] = {"response": length}
            for contender in CONTENDERS:
                found[contender] = fresh(shared | {"contender": contender}, folder, args.threads)
            found["head"] = fresh(shared | {"rows": length}, folder, args.threads)
            norms = [found[c]["norm"] for c in CONTENDERS]
            if max(norms) - min(norms) > (0.02 if args.dtype == "bfloat16" else 1e-3) * max(norms):
                raise RuntimeError(f"{length} tokens: the gradient norms differ: {norms}")
            results.append(found)
            head = found["head"]
            rows.append(
                [
                    str(length),
                    *(f"{found[c]['peak'] / GIB:.2f}" for c in CONTENDERS),
                    *(f"{(found[c]['peak'] - found[c]['at_rest']) / GIB:.2f}" for c in CONTENDERS),
                    f"{head['extra'] / 2**20:.0f}",
                    f"{head['full_logits'] / GIB:.2f}",
                    *(f"{found[c]['seconds']:.1f}" for c in CONTENDERS),
                    *(f"{found['trl'][key] / found['rise'][key]:.2f}" for key in ("seconds", "cpu_seconds")),
                ]
            )
            print("  " + "  ".join(rows[-1]), flush=True)
    header = ["response", "rise GiB", "trl GiB", "rise above rest", "trl above rest", "head MiB", "full logits GiB"]
    _common.print_table([*header, "rise s", "trl s", "trl / rise", "CPU s"], rows)
    target = args.out or _common.ROOT / "results" / device
    setting = {k: v for k, v in vars(args).items() if k not in ("out", "worker")}
    _common.write_results(target / "memory_8k.json", {"setting": setting, "environment": where, "results": results})
    plot(results, title, target / "memory_8k.png")
    print(f"wrote {target}/memory_8k.json and memory_8k.png")


if __name__ == "__main__":
    main()
