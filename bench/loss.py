"""Time, peak memory and error of the loss (forward and backward), ours beside its peers, in one interleaved run.

    python bench/loss.py --device cpu                  # N=4096 D=576 V=49152 float32, the shape of SmolLM2-135M
    python bench/loss.py --n 256 --v 8192 --rounds 3   # a quick look
    python bench/loss.py --device cuda --dtype bfloat16 --n 8192 --d 2560 --v 151936 --peaked --name qwen3-4b

Every provider of bench/providers.py and gpu_providers.py computes the same loss on the same inputs: GRPO at ratio 1 by
default, the guide loss of RISE-RL, or the plain cross-entropy for peers that can do nothing else. Times are wall times
of one forward and backward pass (--forward: of the forward pass), median [p20, p80] over the rounds. Memory is measured
in a pass of its own: the peak beyond inputs and returned gradients, and ("less f32 dW") the same less what a float32 dW
takes beyond a returned 16-bit one, for providers that have one. Errors are against float64, the largest entry
relative to the largest exact entry; with 16-bit inputs also as a multiple of the error of float32 logits, one rounding
of their gradient and one of the result ("x round"). "x floor" and "x ours" divide a median by that of the three bare
products, and of our backend for the device, in the same rounds. "TFLOP/s" is the required work (6 F, or 2 F) over the
time. Writes JSON and a plot to bench/results/<device>/<name>.*.

On a GPU the JSON is written anew as each provider gets its times. A run that is stopped (Ctrl-C, SIGTERM), or that a
peer ends by breaking the GPU's context, still prints its table and plots what it has. The status is 0 if all providers
were reached and ours ran.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which measures the memory, is chatty
sys.path.insert(0, str(Path(__file__).parent))
import _common
from gpu_providers import GPU_PROVIDERS
from providers import EAGER, FLOOR, GAMMA, OURS, PROVIDERS, TRITON, Absent, Problem, Provider, Step

BESIDE = (FLOOR, OURS, TRITON)  # what every provider's time is divided by

# The project's bars on a CPU, for this shape.
TIME_BAR, MEMORY_BAR = 1.2, 0.10
BAR_SHAPE = {"n": 4096, "d": 576, "v": 49152, "dtype": "float32"}


def exact(problem: Problem, rows: int = 128, *, rounded: bool = False) -> tuple[float, torch.Tensor, torch.Tensor]:
    """(loss, dH, dW) in float64 from the equations, a few rows at a time.

    rounded: from float32 logits, their gradient rounded once to the inputs' type, and dH and dW once: the best that a
    kernel with 16-bit operands can do.
    """
    weight = problem.weight.double()
    dh = torch.empty(problem.hidden.shape, dtype=torch.float64, device=weight.device)
    dw = torch.zeros_like(weight)
    advantage = problem.token_advantage().double()
    token_weight = problem.token_weight().double()
    loss = 0.0
    for start in range(0, problem.n, rows):
        part = slice(start, min(problem.n, start + rows))
        hidden, target = problem.hidden[part].double(), problem.target[part, None].clamp(min=0)
        share = token_weight[part, None]
        z = hidden @ weight.T
        log_p = torch.log_softmax(z.float().double() if rounded else z, dim=-1)
        del z
        logp = log_p.gather(1, target)
        if problem.loss == "guide":
            p = logp.exp()
            loss += (share * (torch.log(p + GAMMA) - logp)).sum().item()
            slope = -GAMMA / (p + GAMMA)
        else:
            value = logp if problem.loss == "ce" else advantage[part, None]
            loss += -(share * value).sum().item()
            slope = -advantage[part, None]
        dz = log_p.exp_().neg_()
        dz.scatter_(1, target, -torch.expm1(logp))
        dz *= slope * share
        if rounded:
            scale = (
                2.0 ** (problem.counted - 1).bit_length()
            )  # as every kernel that scales its gradients before rounding
            dz = (dz * scale).to(problem.hidden.dtype).double() / scale
        dh[part] = dz @ weight
        dw += dz.T @ hidden
    if rounded:
        dh, dw = (x.to(problem.hidden.dtype).double() for x in (dh, dw))
    return loss, dh, dw


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


def measure(
    providers: Sequence[Provider], problem: Problem, device: str, rounds: int, warmup: int, results: dict[str, Any]
) -> Iterator[None]:
    """Fills results[provider] with time, memory and error, or {"absent": reason}; yields when one is finished.

    At the end all are timed together. On a GPU, where compiling takes most of a run and a peer can end it, each is
    also timed as soon as it runs, beside the floor and ours.
    """
    steps: dict[str, Step] = {}

    def attempt(name: str, work: Callable[..., Any], *args: Any) -> Any:
        """work(*args), or None with the failure as this provider's result."""
        try:
            found = work(*args)
            _common.synchronize(device)
            return found
        except Absent as reason:
            results[name] = {"absent": str(reason)}
        except Exception as error:  # a peer that does not run here is part of the result
            steps.pop(name, None)
            first_line = next(iter(str(error).splitlines()), "")  # an assert may say nothing
            results[name] = {"absent": f"fails here: {type(error).__name__}: {first_line}"}
            _common.synchronize(device)  # raises once more if the GPU can do nothing after it: that ends the run

    def call(name: str) -> None:
        if name in steps:  # else it failed in an earlier round
            attempt(name, steps[name])

    def time(names: list[str], wanted: list[str]) -> None:
        """The times of the `wanted` in rounds of all of `names`."""
        pairs = _common.interleaved_times(
            {name: partial(call, name) for name in names}, rounds=rounds, warmup=warmup, device=device
        )
        wall, cpu = ({name: [pair[i] for pair in pairs[name]] for name in names if name in steps} for i in (0, 1))
        spread = {name: _common.quantiles(values) for name, values in wall.items()}
        for name in wanted:
            if name in steps:
                results[name] |= {
                    "seconds": spread[name],
                    "cpu_seconds": _common.quantiles(cpu[name]),
                    "all_seconds": wall[name],
                    "ratio": {k: spread[name]["median"] / spread[k]["median"] for k in BESIDE if k in spread},
                }

    results |= {p.name: {"absent": "not reached"} for p in providers}
    expected = exact(problem)
    best = None
    if problem.hidden.dtype != torch.float32:
        _, *low = exact(problem, rounded=True)
        best = {k: relative(x, y) for k, x, y in zip(("dH", "dW"), low, expected[1:])}
        del low
    for provider in providers:
        name = provider.name
        if device not in provider.devices:
            results[name] = {"absent": f"runs on {' and '.join(provider.devices)} only"}
            continue
        print(f"  {name}", flush=True)
        checked = attempt(name, check, provider, problem, device, expected, best)
        if checked is not None:
            steps[name], results[name] = checked
            if device == "cuda":
                time([k for k in steps if k in BESIDE or k == name], [name])
        yield
    del expected
    print("  all together", flush=True)
    time(list(steps), list(steps))
    yield


def check(
    provider: Provider,
    problem: Problem,
    device: str,
    expected: tuple[float, torch.Tensor, torch.Tensor],
    best: dict[str, float] | None,
) -> tuple[Step, dict[str, Any]]:
    """The provider's step, and its row but for the times. best: the errors of one rounding, with 16-bit inputs."""
    step = provider.build(problem)
    found_loss, found_dh, found_dw = step()
    loss, dh, dw = expected
    row: dict[str, Any] = {"products": provider.products}
    if found_loss is not None and not provider.own_loss:
        row["error"] = {"loss": abs(found_loss.item() - loss)}
        if found_dh is not None:
            row["error"] |= {"dH": relative(found_dh, dh), "dW": relative(found_dw, dw)}
        if "dH" in row["error"] and best is not None:
            row["error_x_one_rounding"] = {k: row["error"][k] / best[k] for k in best}
    returned = sum(g.untyped_storage().nbytes() for g in (found_dh, found_dw) if g is not None)
    found_dw_bytes = None if found_dw is None else found_dw.untyped_storage().nbytes()
    del found_loss, found_dh, found_dw
    if device == "cuda":
        row["launches"] = _common.launches(step)
    if provider.name != FLOOR:
        row["extra_bytes"] = _common.peak_bytes(step, device) - returned
        # A float32 dW is a choice of precision, not workspace: what is held beyond it, where the head is 16-bit.
        master = 0 if found_dw_bytes is None else max(0, 4 * problem.weight.numel() - found_dw_bytes)
        row["extra_bytes_beyond_float32_dw"] = row["extra_bytes"] - master
        resident = _common.resident_peak_bytes(step) if device == "cpu" else None
        row["extra_resident_bytes"] = None if resident is None else resident - returned
    return step, row


def show(results: dict[str, dict[str, Any]], required: float) -> None:
    """required: FLOPs that the problem asks for."""
    eager_bytes = results.get(EAGER, {}).get("extra_bytes")
    ours = TRITON if "seconds" in results.get(TRITON, {}) else OURS
    rows = []
    for name, row in results.items():
        if "absent" in row:
            rows.append([name, "absent", *[""] * 14])
            continue
        s, error, extra = row.get("seconds"), row.get("error"), row.get("extra_bytes")
        rounding, ratio = row.get("error_x_one_rounding"), row.get("ratio", {})
        rows.append(
            [
                name, f"{row['products']} F", f"{s['median'] * 1e3:.4g}" if s else "",
                f"[{s['p20'] * 1e3:.4g}, {s['p80'] * 1e3:.4g}]" if s else "",
                *(f"{ratio[k]:.2f}" if k in ratio else "" for k in (FLOOR, ours)),
                "" if extra is None else f"{extra / 2**20:.0f}",
                "" if extra is None else f"{row['extra_bytes_beyond_float32_dw'] / 2**20:.0f}",
                "" if extra is None or not eager_bytes else f"{100 * extra / eager_bytes:.1f}%",
                *("" if error is None or k not in error else f"{error[k]:.1e}" for k in ("loss", "dH", "dW")),
                *(f"{rounding[k]:.2f}" if rounding else "" for k in ("dH", "dW")),
                f"{required / s['median'] / 1e12:.3g}" if s else "", str(row.get("launches", "")),
            ]
        )  # fmt: skip
    _common.print_table(
        [
            "", "work", "ms", "[p20, p80]", "x floor", "x ours", "extra MiB", "less f32 dW", "of eager", "loss err",
            "dH err", "dW err", "dH x round", "dW x round", "TFLOP/s", "launches",
        ],
        rows,
    )  # fmt: skip
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
    if FLOOR in shown:
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
    parser.add_argument("--n", type=int, nargs="+", default=[4096], help="tokens; several: one after the other")
    parser.add_argument("--d", type=int, default=576, help="hidden size")
    parser.add_argument("--v", type=int, default=49152, help="vocabulary")
    parser.add_argument("--sequences", type=int, default=8, help="sequences that the tokens belong to")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--loss", choices=["policy", "guide", "ce"], default="policy")
    parser.add_argument("--peaked", action="store_true", help="probabilities of a trained model on its own samples")
    parser.add_argument("--ragged", action="store_true", help="unequal sequences, about 30 %% of the rows ignored")
    parser.add_argument("--forward", action="store_true", help="the forward pass only")
    parser.add_argument(
        "--name", default="loss", help="name of the result files; with several --n, of each name-n<tokens>"
    )
    parser.add_argument("--providers", nargs="+", help="these alone, beside the floor, eager torch and ours")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own)")
    parser.add_argument("--out", type=Path, help="folder for the JSON and the plot (default: bench/results/<device>)")
    args = parser.parse_args()
    for n in args.n:
        if n % args.sequences and not args.ragged:
            parser.error(f"--n {n}: expected a multiple of --sequences ({args.sequences})")
    providers = (*PROVIDERS, *(GPU_PROVIDERS if args.device == "cuda" else ()))
    if args.providers:
        if unknown := set(args.providers) - {p.name for p in providers}:
            parser.error(f"--providers: {sorted(unknown)}, expected some of {[p.name for p in providers]}")
        providers = tuple(p for p in providers if p.name in (EAGER, *BESIDE, *args.providers))
    if args.threads:
        torch.set_num_threads(args.threads)
    signal.signal(signal.SIGTERM, stop)
    failed = set()
    for n in args.n:
        results = run(args, n, args.name if len(args.n) == 1 else f"{args.name}-n{n}", providers)
        failed |= {k for k, row in results.items() if k.startswith("rise") and "fails" in row.get("absent", "")}
    if failed:
        sys.exit(f"failed: {', '.join(sorted(failed))}")


def stop(*_: object) -> None:
    """As Ctrl-C does, but once: `timeout` sends the signal to this process and then to its group."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def run(args: argparse.Namespace, n: int, name: str, providers: Sequence[Provider]) -> dict[str, dict[str, Any]]:
    """One problem of n tokens: the results, and the table, the JSON and the plot of them however it ends."""
    problem = Problem.random(
        n, args.d, args.v, sequences=args.sequences, loss=args.loss, dtype=getattr(torch, args.dtype),
        device=args.device, peaked=args.peaked, ragged=args.ragged,
    )  # fmt: skip
    problem.forward_only = args.forward
    where = _common.environment(args.device)
    kind = f"{args.loss} loss{' forward' * args.forward}{', peaked' * args.peaked}{', ragged' * args.ragged}"
    title = f"{kind}, N={n} D={args.d} V={args.v} {args.dtype}, {where['device']}"
    print(f"{title}, {where['threads']} threads, torch {where['torch']}")
    setting = {"n": n} | {
        k: getattr(args, k)
        for k in ("d", "v", "sequences", "dtype", "loss", "peaked", "ragged", "forward", "rounds", "warmup")
    }
    at_bar_shape = args.device == "cpu" and all(setting[k] == v for k, v in BAR_SHAPE.items())
    folder = args.out or _common.ROOT / "results" / args.device
    results: dict[str, dict[str, Any]] = {}
    met: dict[str, bool] = {}

    def timed() -> bool:
        return any("seconds" in row for row in results.values())

    def save() -> None:
        if timed():  # else an earlier file says more
            _common.write_results(
                folder / f"{name}.json", {"setting": setting, "environment": where, "bars": met, "results": results}
            )

    try:
        for _ in measure(providers, problem, args.device, args.rounds, args.warmup, results):
            save()
        met |= bars(results) if at_bar_shape else {}
    finally:
        show(results, (2 if args.forward else 6) * problem.counted * args.d * args.v)
        for bar, yes in met.items():
            print(f"{'met    ' if yes else 'NOT met'} {OURS}: {bar}")
        save()
        if timed():
            plot(results, title, folder / f"{name}.png")
            print(f"wrote {folder}/{name}.json and {name}.png", flush=True)
    return results


if __name__ == "__main__":
    main()
