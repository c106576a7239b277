"""Time, peak memory and error of the loss (forward and backward), ours beside its peers, in one interleaved run.

    python bench/loss.py --device cpu                  # N=4096 D=576 V=49152 float32, the shape of SmolLM2-135M
    python bench/loss.py --n 256 --v 8192 --rounds 3   # a quick look

Every provider of bench/providers.py computes the same loss on the same inputs: GRPO at ratio 1 by default, or the
guide loss of RISE-RL. Times are wall times of one forward and backward pass, median [p20, p80] over the rounds. Memory
is measured in a pass of its own: the peak beyond inputs and returned gradients. Errors are against float64, the
largest entry relative to the largest exact entry. Writes JSON and a plot to bench/results/<device>/loss.*.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which measures the memory, is chatty
sys.path.insert(0, str(Path(__file__).parent))
import _common
from providers import EAGER, FLOOR, GAMMA, OURS, PROVIDERS, Absent, Problem

# The project's bars on a CPU, for this shape.
TIME_BAR, MEMORY_BAR = 1.2, 0.10
BAR_SHAPE = {"n": 4096, "d": 576, "v": 49152, "dtype": "float32"}


def exact(problem: Problem, rows: int = 128) -> tuple[float, torch.Tensor, torch.Tensor]:
    """(loss, dH, dW) in float64 from the equations, a few rows at a time."""
    weight = problem.weight.double()
    dh = torch.empty(problem.hidden.shape, dtype=torch.float64, device=weight.device)
    dw = torch.zeros_like(weight)
    advantage = problem.token_advantage().double()
    loss = 0.0
    for start in range(0, problem.n, rows):
        part = slice(start, min(problem.n, start + rows))
        hidden, target = problem.hidden[part].double(), problem.target[part, None]
        log_p = torch.log_softmax(hidden @ weight.T, dim=-1)
        logp = log_p.gather(1, target)
        if problem.loss == "guide":
            p = logp.exp()
            loss += (torch.log(p + GAMMA) - logp).sum().item() / problem.n
            slope = -GAMMA / (p + GAMMA)
        else:
            loss += -advantage[part].sum().item() / problem.n
            slope = -advantage[part, None]
        dz = log_p.exp_().neg_()
        dz.scatter_(1, target, -torch.expm1(logp))
        dz *= slope / problem.n
        dh[part] = dz @ weight
        dw += dz.T @ hidden
    return loss, dh, dw


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


def measure(problem: Problem, device: str, rounds: int, warmup: int) -> dict[str, dict[str, Any]]:
    """By provider: time, memory and error, or {"absent": reason}."""
    results: dict[str, dict[str, Any]] = {}
    steps = {}
    loss, dh, dw = exact(problem)
    for provider in PROVIDERS:
        if device not in provider.devices:
            results[provider.name] = {"absent": f"runs on {' and '.join(provider.devices)} only"}
            continue
        try:
            step = provider.build(problem)
        except Absent as reason:
            results[provider.name] = {"absent": str(reason)}
            continue
        print(f"  checking {provider.name}", flush=True)
        try:
            found_loss, found_dh, found_dw = step()
        except Exception as error:  # a peer that does not run here is part of the result
            results[provider.name] = {"absent": f"fails here: {type(error).__name__}: {str(error).splitlines()[0]}"}
            continue
        row: dict[str, Any] = {"products": provider.products}
        if found_loss is not None:
            row["error"] = {
                "loss": abs(found_loss.item() - loss), "dH": relative(found_dh, dh), "dW": relative(found_dw, dw),
            }  # fmt: skip
        returned = sum(g.untyped_storage().nbytes() for g in (found_dh, found_dw))
        del found_loss, found_dh, found_dw
        if provider.name != FLOOR:
            row["extra_bytes"] = _common.peak_bytes(step, device) - returned
            resident = _common.resident_peak_bytes(step) if device == "cpu" else None
            row["extra_resident_bytes"] = None if resident is None else resident - returned
        results[provider.name] = row
        steps[provider.name] = step
    del dh, dw
    print("  timing", flush=True)
    times = _common.interleaved_times(steps, rounds=rounds, warmup=warmup, device=device)
    for name, values in times.items():
        wall, cpu = ([pair[i] for pair in values] for i in (0, 1))
        results[name] |= {
            "seconds": _common.quantiles(wall),
            "cpu_seconds": _common.quantiles(cpu),
            "all_seconds": wall,
        }
    return results


def show(results: dict[str, dict[str, Any]]) -> None:
    floor = results[FLOOR]["seconds"]["median"]
    eager_bytes = results[EAGER].get("extra_bytes")
    rows = []
    for name, row in results.items():
        if "absent" in row:
            rows.append([name, "absent", *[""] * 8])
            continue
        s, error, extra = row["seconds"], row.get("error"), row.get("extra_bytes")
        rows.append(
            [
                name, f"{row['products']} F", f"{s['median'] * 1e3:.0f}",
                f"[{s['p20'] * 1e3:.0f}, {s['p80'] * 1e3:.0f}]", f"{s['median'] / floor:.2f}",
                "" if extra is None else f"{extra / 2**20:.0f}",
                "" if extra is None or not eager_bytes else f"{100 * extra / eager_bytes:.1f}%",
                *(["", "", ""] if error is None else [f"{error[k]:.1e}" for k in ("loss", "dH", "dW")]),
            ]
        )  # fmt: skip
    _common.print_table(
        ["", "work", "ms", "[p20, p80]", "x floor", "extra MiB", "of eager", "loss err", "dH err", "dW err"], rows
    )
    for name, row in results.items():
        if "absent" in row:
            print(f"{name}: absent: {row['absent']}")


def bars(results: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """The three things that the chunked backend must show at BAR_SHAPE on a CPU."""
    ours = results[OURS]
    mine = ours["seconds"]["median"]
    peers = [
        row["seconds"]["median"]
        for name, row in results.items()
        if "seconds" in row and name != FLOOR and not name.startswith("rise")
    ]
    return {
        f"at most {TIME_BAR} x the three products": mine <= TIME_BAR * results[FLOOR]["seconds"]["median"],
        "faster than every peer": all(mine < peer for peer in peers),
        f"extra memory under {MEMORY_BAR:.0%} of eager's": ours["extra_bytes"]
        < MEMORY_BAR * results[EAGER]["extra_bytes"],
    }


def plot(results: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = {name: row for name, row in results.items() if "seconds" in row}
    names = list(shown)[::-1]
    colors = ["#c44e52" if n.startswith("rise") else "#999999" if n == FLOOR else "#4c72b0" for n in names]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 0.45 * len(names) + 1.4), sharey=True)
    seconds = [shown[n]["seconds"] for n in names]
    spread = [[s["median"] - s["p20"] for s in seconds], [s["p80"] - s["median"] for s in seconds]]
    left.barh(names, [s["median"] for s in seconds], xerr=spread, color=colors)
    left.axvline(shown[FLOOR]["seconds"]["median"], color="#999999", linestyle=":")
    left.set_xlabel("seconds, forward + backward (median, p20 to p80)")
    right.barh(names, [shown[n].get("extra_bytes", 0) / 2**20 for n in names], color=colors)
    right.set_xlabel("peak MiB beyond inputs and gradients")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--n", type=int, default=4096, help="tokens")
    parser.add_argument("--d", type=int, default=576, help="hidden size")
    parser.add_argument("--v", type=int, default=49152, help="vocabulary")
    parser.add_argument("--sequences", type=int, default=8, help="sequences that the tokens belong to")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--loss", choices=["policy", "guide"], default="policy")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own)")
    parser.add_argument("--out", type=Path, help="folder for loss.json and loss.png (default: bench/results/<device>)")
    args = parser.parse_args()
    if args.n % args.sequences:
        parser.error(f"--n {args.n}: expected a multiple of --sequences ({args.sequences})")
    if args.threads:
        torch.set_num_threads(args.threads)
    problem = Problem.random(
        args.n, args.d, args.v, sequences=args.sequences, loss=args.loss, dtype=getattr(torch, args.dtype),
        device=args.device,
    )  # fmt: skip
    where = _common.environment(args.device)
    title = f"{args.loss} loss, N={args.n} D={args.d} V={args.v} {args.dtype}, {where['device']}"
    print(f"{title}, {where['threads']} threads, torch {where['torch']}")
    results = measure(problem, args.device, args.rounds, args.warmup)
    show(results)
    at_bar_shape = args.device == "cpu" and all(getattr(args, k) == v for k, v in BAR_SHAPE.items())
    met = bars(results) if at_bar_shape else {}
    for bar, yes in met.items():
        print(f"{'met    ' if yes else 'NOT met'} {OURS}: {bar}")
    folder = args.out or _common.ROOT / "results" / args.device
    setting = {k: getattr(args, k) for k in ("n", "d", "v", "sequences", "dtype", "loss", "rounds", "warmup")}
    _common.write_results(
        folder / "loss.json", {"setting": setting, "environment": where, "bars": met, "results": results}
    )
    plot(results, title, folder / "loss.png")
    print(f"wrote {folder}/loss.json and loss.png")


if __name__ == "__main__":
    main()
