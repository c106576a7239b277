"""A run folder as a trainer would leave it, with made-up numbers that move like those of a real run."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from rise_rl.config import Config, RunConfig
from rise_rl.plateau import smooth
from rise_rl.run_folder import RunFolder

CRITERIA = {
    "health": [("mention drinking water", 10.0), ("mention seeing a doctor", 8.0), ("apologising", -5.0)],
    "story": [("give the main character the name Anna", 10.0), ("mention the rain", 8.0), ("let a dog appear", 5.0)],
    "travel & <food>": [("mention the cost or a budget", 10.0), ("mention a bus, a train or a tram", 8.0)],
}


def create(path: Path, config: RunConfig) -> RunFolder:
    """A run that has begun."""
    run = RunFolder.new(path, config)
    run.begin()
    return run


def make_run(
    path: Path,
    *,
    steps: int,
    planned: int | None = None,
    switch: int | None = None,
    guided: bool = True,
    every: int = 5,
    seed: int = 0,
) -> RunFolder:
    """switch: last guided step; every: steps between evaluations (0: none)."""
    noise = random.Random(7 + seed)
    planned = planned or steps
    run = create(
        path,
        Config.model_validate(
            {
                "name": path.name,
                "model": "smollm2-135m",
                "steps": planned,
                "seed": seed,
                "data": {"train": "data/train.jsonl", "heldout": "data/heldout.jsonl"},
                "guidance": {"enabled": guided},
            }
        ),
    )
    if every:
        run.log_eval(evaluation(0, 0.0, seed))
    previous: dict[str, Any] = {}
    for step in range(1, steps + 1):
        done = 1 - math.exp(-step / (0.4 * planned))
        active = guided and (switch is None or step <= switch)
        natural = 0.15 + 0.35 * done + noise.gauss(0, 0.03)
        better = natural + 0.25 * (1 - done) + noise.gauss(0, 0.03)
        row: dict[str, Any] = {
            "step": step,
            "reward/natural": natural,
            "reward/guided": better if active else None,
            "gap/raw": better - natural if active else None,
            "guidance/active": active,
            "guided/generated": 32 if active else 0,
            "guided/kept": int(32 * (0.6 - 0.4 * done)) if active else 0,
            "guided/kept_fraction": (0.6 - 0.4 * done) if active else None,
            "entropy": 2.4 - 1.1 * done + noise.gauss(0, 0.05),
            "grad_norm": 1.4 - done * 0.6 + abs(noise.gauss(0, 0.2)),
            "length/natural_mean": 30 - 6 * done,
            "length/guided_mean": 28 - 4 * done if active else None,
            "truncated/natural": 0.8 - 0.5 * done,
            "truncated/guided": 0.7 - 0.4 * done if active else None,
            "unknown_verdicts": 1 if step == 2 else 0,
            "ungraded_samples": 1 if step == 2 else 0,
            "groups/zero_advantage": 1,
            "logprob_gap/max": 2e-5,
            "time/rollout": 5 + noise.random(),
            "time/guided_rollout": 3 + noise.random() if active else None,
            "time/grade": 0.1,
            "time/train": 9 + noise.random(),
            "time/sync": 0.7,
            "time/evaluate": 6.0 if every and step % every == 0 else None,
        }
        row["time/step"] = sum(v for k, v in row.items() if k.startswith("time/") and v) + 0.2
        row["time/checkpoint"] = 1.5 if step % 10 == 0 else None
        for name, source in (("reward/natural_smoothed", "reward/natural"), ("gap/smoothed", "gap/raw")):
            row[name] = smooth(previous.get(name), row[source])
        if every and step % every == 0:
            run.log_eval(evaluation(step, done, seed))
        run.log_metrics(row)
        run.write_rollouts(step, rollouts(step, active))
        previous = row
    return run


def evaluation(step: int, done: float, seed: int = 0) -> dict[str, Any]:
    noise = random.Random(step + 1000 * seed)
    criteria = []
    for topic, listed in CRITERIA.items():
        for prompt in range(2):
            for k, (text, weight) in enumerate(listed):
                missed = min(8, max(0, round(8 * (0.95 - 0.7 * done * (k != 1)) + noise.gauss(0, 0.6))))
                key = {"uid": f"{topic}-{prompt}", "criterion": k, "text": text, "weight": weight, "topic": topic}
                criteria.append(key | {"failures": missed, "samples": 8})
    return {
        "step": step,
        "reward/mean": 0.14 + (0.33 + 0.01 * seed) * done,
        "score/mean": 0.12 + 0.33 * done,
        "length/mean": 30 - 5 * done,
        "truncated": 0.8 - 0.5 * done,
        "unknown_verdicts": 0,
        "samples": 48,
        "criteria": criteria,
    }


def rollouts(step: int, active: bool) -> list[dict[str, Any]]:
    records = []
    for topic, listed in CRITERIA.items():
        for kind in ("natural", "natural", "guided") if active else ("natural", "natural"):
            index = len(records)
            verdicts: list[float | None] = [float((index + k) % 2) for k in range(len(listed))]
            verdicts[-1] = None if index == 1 else verdicts[-1]
            records.append(
                {
                    "uid": f"{topic}-{step}",
                    "index": index,
                    "kind": kind,
                    "prompt": f"A question about {topic}, asked at step {step}?",
                    "response": f"<script>alert({index})</script> & an answer\n\nin two paragraphs. "
                    + "Words follow. " * 40,
                    "finish_reason": "length" if index % 2 else "stop",
                    "tokens": 128,
                    "weight_version": step - 1,
                    "reward": None if None in verdicts else 0.1 * index,
                    "verdicts": verdicts,
                    "shown": [0] if kind == "guided" else [],
                    "criteria": [{"text": text, "weight": weight} for text, weight in listed],
                }
            )
    return records
