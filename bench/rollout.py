"""Rollouts with vLLM and with transformers: tokens per second, what a weight sync costs, where a step's time goes, and
what overlapping sampling with grading saves.

    python bench/rollout.py                       # about 5 minutes on two quiet cores; needs vLLM
    python bench/rollout.py --model path --json results.json

Engines answer the same requests in turn, several rounds, so that a disturbance of the machine meets both; no answer
stops early, so that both do equal work. The steps are real ones of the quickstart, smaller. The judge of the last table
judges by rules and takes as long as a judge of 120 billion parameters might: 2 to 8 seconds an answer.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _common import ROOT, environment, interleaved_times, print_table, quantiles, write_results
from rich.console import Console

from rise_engine.config import EngineConfig
from rise_engine.parity import parity_probe
from rise_engine.policy import PolicyEngine
from rise_engine.prompts import render_prompt
from rise_engine.rollout.base import RolloutRequest, Sampling
from rise_engine.rollout.transformers import TransformersRollout
from rise_engine.rollout.vllm import VllmRollout
from rise_engine.seeds import derive_seed
from rise_rl.config import load_config
from rise_rl.fetch import resolve_model
from rise_rl.graders import RuleGrader
from rise_rl.graders.base import GradeItem
from rise_rl.launch import run_training
from rise_rl.rubric import Verdict

QUESTIONS = (
    "Write a short poem about the sea.",
    "Give me some advice about how to sleep better, please.",
    "Tell me about the moon.",
    "What should I cook tonight with potatoes and onions?",
)
PHASES = ("rollout", "guided_rollout", "grade", "train", "sync")
STEP = [
    *("steps=2", "data.heldout=null", "grpo.prompts_per_step=4", "grpo.group_size=4", "guidance.rollouts=2"),
    *("rollout.max_rows=8", "checkpoint.every=0", "guidance.remove_at=never"),
]


class PatientJudge:
    """Verdicts by rules, after the seconds that a judge would take: drawn for every answer, the same in every run. All
    answers of one call are judged at once, as LlmGrader does.
    """

    def grade(self, items: Sequence[GradeItem]) -> list[list[Verdict]]:
        draws = (random.Random(derive_seed(item.uid, item.response)) for item in items)
        time.sleep(max(min(8.0, draw.lognormvariate(1.1, 0.5)) for draw in draws))
        return RuleGrader().grade(items)


judge = PatientJudge()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a fetched name or a transformers folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where results go (default: bench/results/<device>/rollout.json)")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = str(resolve_model(args.model))
    results: dict[str, Any] = {"environment": environment(device), "model": args.model, "new_tokens": args.new_tokens}

    results |= engines(model, args.rows, args.new_tokens, args.rounds, device)
    print(flush=True)
    results["steps"] = steps(model)
    write_results(args.json or ROOT / "results" / device / "rollout.json", results)


def engines(model: str, sizes: list[int], new_tokens: int, rounds: int, device: str) -> dict[str, Any]:
    """Tokens per second by rows, and the cost of a sync."""
    policy = PolicyEngine(model, EngineConfig())
    policy.stop_ids = (policy.model.config.vocab_size - 1,)  # a token that is hardly ever sampled
    prompts = [render_prompt(policy.tokenizer, [{"role": "user", "content": q}]) for q in QUESTIONS]
    started = time.perf_counter()
    vllm = VllmRollout(policy, context_length=max(map(len, prompts)) + new_tokens, max_rows=max(sizes))
    start = time.perf_counter() - started
    both = {"vLLM": vllm, "transformers": TransformersRollout(policy, max_rows=max(sizes))}
    for engine in both.values():
        engine.sync(0)

    rates: dict[str, dict[str, Any]] = {}
    for rows in sizes:
        requests = [RolloutRequest("bench", i, prompts[i % len(prompts)], seed=i) for i in range(rows)]
        sampled: dict[str, int] = {}

        def answer(name: str, requests: list[RolloutRequest] = requests, sampled: dict[str, int] = sampled) -> None:
            found = both[name].generate(requests, Sampling(new_tokens))
            sampled[name] = sum(len(r.token_ids) for r in found)

        work: dict[str, Callable[[], None]] = {name: lambda name=name: answer(name) for name in both}  # type: ignore[misc]
        times = interleaved_times(work, rounds=rounds, warmup=1, device=device)
        rates[str(rows)] = {
            name: {"tokens_per_second": quantiles([sampled[name] / wall for wall, _ in spent])}
            for name, spent in times.items()
        }
    table = []
    for rows, found in rates.items():
        rate = {name: found[name]["tokens_per_second"]["median"] for name in both}
        ratio = rate["vLLM"] / rate["transformers"]
        table.append([rows, *(f"{rate[name]:.1f}" for name in both), f"{ratio:.2f}"])
    print_table(["answers at once", *(f"{name}, tokens/s" for name in both), "ratio"], table)

    syncs, probes = [], []
    for _ in range(rounds):
        vllm.release()  # on a GPU a sync wakes vLLM, and moves the optimizer out of its way
        vllm.sync(0)
        assert vllm.last_sync is not None
        syncs.append(vllm.last_sync.seconds)
        started = time.perf_counter()
        parity_probe(vllm, policy)
        probes.append(time.perf_counter() - started)
    sent = vllm.last_sync.bytes
    print(f"\nstart of vLLM {start:.1f} s; a sync {median(syncs):.2f} s for {sent / 2**20:.0f} MiB;", end=" ")
    print(f"the parity probe after it {median(probes):.2f} s")
    sync = {"seconds": quantiles(syncs), "bytes": sent, "probe_seconds": quantiles(probes)}
    return {"rates": rates, "vllm_start_seconds": start, "sync": sync}


def steps(model: str) -> dict[str, Any]:
    """Seconds by phase of a training step, by engine, and by schedule with a judge that takes its time."""
    patient = ["grader=rollout:judge", "rollout.engine=vllm"]
    runs = {
        "transformers": ["rollout.engine=transformers"],
        "vLLM": ["rollout.engine=vllm"],
        "vLLM, slow judge, lockstep": patient,
        "vLLM, slow judge, overlapped": [*patient, "rollout.schedule=overlapped"],
    }
    found = {name: a_run(model, overrides) for name, overrides in runs.items()}
    table = []
    for name, phases in found.items():
        total = sum(phases.values())
        shares = [f"{phases[phase]:.1f} ({phases[phase] / total:.0%})" for phase in PHASES]
        table.append([name, *shares, f"{total:.1f}"])
    print_table(["seconds of a step", *PHASES, "together"], table)
    lockstep, overlapped = (
        sum(found[f"vLLM, slow judge, {schedule}"][phase] for phase in PHASES[:3])
        for schedule in ("lockstep", "overlapped")
    )
    print(f"\nsampling and grading take {lockstep:.1f} s in lockstep, {overlapped:.1f} s overlapped", end=" ")
    print(f"({overlapped / lockstep:.0%})")
    return found


def a_run(model: str, overrides: list[str]) -> dict[str, float]:
    """Mean seconds of the steps by phase."""
    recipe, train = ROOT.parent / "recipes" / "quickstart.yaml", ROOT.parent / "data" / "quickstart" / "train.jsonl"
    with tempfile.TemporaryDirectory() as output:
        given = [f"output={output}", f"model={model}", f"data.train={train}"]
        config = load_config(recipe, [*given, *STEP, *overrides])
        folder = run_training(config, console=Console(quiet=True))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {phase: sum(line[f"time/{phase}"] for line in lines) / len(lines) for phase in PHASES}


if __name__ == "__main__":
    main()
