"""A step's metrics, under the names of `metrics.METRICS`. Values that do not exist for a step are None."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rise_engine.sequences import StepStats

from .graders.judge_stats import JudgeStats
from .samples import Sample
from .step_loss import StepLoss

Value = float | None


def mean(values: Iterable[Value]) -> Value:
    """Over the values that exist; None when none does."""
    known = [v for v in values if v is not None]
    return fmean(known) if known else None


def reward_gap(natural: Sequence[Sample], guided: Sequence[Sample]) -> tuple[Value, Value]:
    """Delta_r (eq. 13): mean guided minus mean natural reward of a prompt, averaged over the prompts with graded
    answers of both kinds; and the same with the natural mean taken over all prompts of the step.

    Every prompt weighs the same, however many of its answers are graded: otherwise easy prompts with more graded
    answers of one kind would look like a gap.
    """
    unaided, aided = prompt_means(natural), prompt_means(guided)
    uids = [uid for uid in aided if uid in unaided]
    if not uids:
        return None, None
    privileged = fmean(aided[uid] for uid in uids)
    return privileged - fmean(unaided[uid] for uid in uids), privileged - fmean(unaided.values())


def prompt_means(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean reward of the graded samples of each prompt that has any."""
    rewards = defaultdict(list)
    for s in samples:
        if s.reward is not None:
            rewards[s.example.uid].append(s.reward)
    return {uid: fmean(values) for uid, values in rewards.items()}


def sample_metrics(natural: Sequence[Sample], guided: Sequence[Sample], loss: StepLoss) -> dict[str, Value]:
    """What the answers were like."""
    everyone = [*natural, *guided]
    graded = {s.example.uid for s in natural if s.reward is not None}
    pushed = {s.uid for s in loss.sequences if not s.is_guide and s.advantage != 0}
    kept = sum(gain > 0 for gain in loss.gains)
    raw, over_all = reward_gap(natural, guided)
    shaped = [None if s.reward is None else s.reward + p for s, p in zip(natural, loss.penalties)]
    return {
        "reward/natural": mean(s.reward for s in natural),
        "reward/guided": mean(s.reward for s in guided),
        "reward/shaped": mean(shaped),
        "overlong_penalty/mean": mean(loss.penalties),
        "gap/raw": raw,
        "gap/all_prompts": over_all,
        "guided/generated": len(guided),
        "guided/kept": kept,
        "guided/kept_fraction": kept / len(guided) if guided else None,
        "length/natural_mean": mean(s.length for s in natural),
        "length/guided_mean": mean(s.length for s in guided),
        "truncated/natural": mean(float(s.truncated) for s in natural),
        "truncated/guided": mean(float(s.truncated) for s in guided),
        "unknown_verdicts": sum(v is None for s in everyone for v in s.verdicts),
        "samples": len(everyone),
        "ungraded_samples": sum(s.reward is None for s in everyone),
        "groups/zero_advantage": len(graded - pushed),
        "tokens/generated": sum(s.length for s in everyone),
    }


def training_metrics(stats: StepStats, sequences: int) -> dict[str, Value]:
    """What the updates of a step did; NaN of the engine (no such token) becomes None, and so do loss and gradient of a
    step that had nothing to learn from.
    """
    values: Mapping[str, float] = {
        "skipped": int(stats.skipped),
        "loss": stats.loss,
        "loss/policy": stats.policy_loss,
        "loss/guide": stats.guide_loss,
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "clip_fraction": stats.clip_fraction,
        "rho/mean": stats.mean_support,
        "entropy": stats.entropy,
        "ratio/mean": stats.ratio_mean,
        "ratio/max": stats.ratio_max,
        "kl": stats.kl,
        "logprob_gap/mean": stats.logprob_gap_mean,
        "logprob_gap/p99": stats.logprob_gap_p99,
        "logprob_gap/max": stats.logprob_gap_max,
        "importance/kept": stats.importance_kept,
        "tokens/trained": stats.tokens,
        "sequences/forwarded": stats.forwarded_sequences,
        "sequences/skipped": sequences - stats.forwarded_sequences,
    }
    without = {"loss", "loss/policy", "loss/guide", "grad_norm"} if stats.skipped else set()
    return {name: None if name in without or math.isnan(value) else value for name, value in values.items()}


def judge_metrics(stats: Sequence[JudgeStats]) -> dict[str, Value]:
    """What the judges of all ranks have cost so far; nothing without a judge."""
    if not stats:
        return {}
    counters = ("calls", "retries", "cache_hits", "prompt_tokens", "completion_tokens")
    together = JudgeStats(latencies=deque(latency for s in stats for latency in s.latencies))
    return {f"judge/{name}": sum(getattr(s, name) for s in stats) for name in counters} | {
        "judge/latency_p95_s": together.latency(0.95)
    }


def criterion_failures(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Per criterion of the cohort: how many of its samples fail it (a graded verdict fails by 1 - value; a negative
    criterion fails by being met), for the report's heat map.
    """
    failures: Counter[tuple[str, int]] = Counter()
    judged: Counter[tuple[str, int]] = Counter()
    examples = {s.example.uid: s.example for s in samples}
    for sample in samples:
        for k, (criterion, verdict) in enumerate(zip(sample.example.rubric.criteria, sample.verdicts)):
            if verdict is not None:
                key = (sample.example.uid, k)
                judged[key] += 1
                failures[key] += 1 - verdict if criterion.weight > 0 else verdict  # type: ignore[assignment]
    return [
        {
            "uid": uid,
            "criterion": k,
            "text": criterion.text,
            "weight": criterion.weight,
            "topic": example.domain,
            "failures": failures[uid, k],
            "samples": judged[uid, k],
        }
        for uid, example in examples.items()
        for k, criterion in enumerate(example.rubric.criteria)
    ]
