"""Every number a run writes, under its name: the one table that the trainer, the report and docs/metrics.md share.

`python -m rise_rl.metrics` prints the page.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Metric(NamedTuple):
    description: str
    unit: str = ""


METRICS: dict[str, Metric] = {
    "step": Metric(
        "rollout batches trained on, this one included (from 1); each is one optimizer update or several", "steps"
    ),
    "epoch": Metric("passes over the training prompts before this step", "epochs"),
    "reward/natural": Metric("mean complete-rubric reward of the natural rollouts (eq. 3)", "reward, 0-1"),
    "reward/natural_smoothed": Metric("its exponential moving average (weight of the past 0.9)", "reward, 0-1"),
    "reward/guided": Metric("mean complete-rubric reward of the guided rollouts", "reward, 0-1"),
    "reward/shaped": Metric("mean of reward plus overlong penalty, which GRPO's advantages use", "reward"),
    "gap/raw": Metric(
        "Delta_r (eq. 13): a prompt's guided minus its natural mean, averaged over the prompts with graded answers of "
        "both kinds",
        "reward",
    ),
    "gap/smoothed": Metric("its exponential moving average; the plateau rule looks at it", "reward"),
    "gap/all_prompts": Metric("the same with the natural mean over all prompts of the step", "reward"),
    "lambda": Metric("weight of the guide loss (eq. 12); 0 once guidance is removed, and where it is coupled"),
    "guidance/active": Metric("whether guided rollouts were generated", "true/false"),
    "guided/generated": Metric("guided rollouts", "samples"),
    "guided/kept": Metric("guided rollouts that beat their prompt's natural mean (eq. 7)", "samples"),
    "guided/kept_fraction": Metric("kept of generated", "0-1"),
    "guided/no_feedback_prompts": Metric("prompts without guided rollouts: nothing missed, or no hint fits", "prompts"),
    "guided/dropped_criteria": Metric("criteria left out of hints because the budget was full", "criteria"),
    "rho/mean": Metric("mean support factor p / (p + gamma) of the kept guided tokens (eq. 10)", "0-1"),
    "entropy": Metric(
        "mean entropy of the policy at rollout.temperature, over the natural tokens of the sequences forwarded", "nats"
    ),
    "clip_fraction": Metric("natural tokens of the sequences forwarded whose ratio was clipped", "0-1"),
    "ratio/mean": Metric("mean of new over old probability", "ratio"),
    "ratio/max": Metric("largest of new over old probability", "ratio"),
    "kl": Metric("mean KL estimate to the reference policy over the natural tokens, where there is a KL term", "nats"),
    "loss": Metric("total loss (eq. 12)"),
    "loss/policy": Metric("its GRPO part"),
    "loss/guide": Metric("its guide part, lambda included"),
    "grad_norm": Metric("gradient norm before clipping"),
    "lr": Metric("learning rate of this step"),
    "length/natural_mean": Metric("mean length of natural responses, stop token included", "tokens"),
    "length/guided_mean": Metric("mean length of guided responses", "tokens"),
    "truncated/natural": Metric("natural responses cut at the maximum length", "0-1"),
    "truncated/guided": Metric("guided responses cut at the maximum length", "0-1"),
    "overlong_penalty/mean": Metric("mean overlong penalty (0 or below)", "reward"),
    "unknown_verdicts": Metric("criteria that the grader could not judge", "verdicts"),
    "samples": Metric("answers of the step, natural and guided", "samples"),
    "ungraded_samples": Metric("samples left out because a verdict is unknown", "samples"),
    "groups/zero_advantage": Metric(
        "prompts with graded natural answers but no policy gradient: all advantages are 0, or what is not is masked",
        "prompts",
    ),
    "skipped": Metric("1 if the step had nothing to learn from and changed no weight", "0 or 1"),
    "sequences/forwarded": Metric("sequences that the updates of the step computed", "sequences"),
    "sequences/skipped": Metric("sequences not computed because they cannot change anything", "sequences"),
    "logprob_gap/mean": Metric(
        "mean |log-prob difference| between rollout engine and trainer, over tokens of the sequences forwarded that "
        "were sampled under the prompt they are learnt under",
        "nats",
    ),
    "logprob_gap/p99": Metric("its 99th percentile", "nats"),
    "logprob_gap/max": Metric("its maximum", "nats"),
    "importance/kept": Metric(
        "of the sequences forwarded: tokens, or sequences, whose importance factor is at most grpo.importance_cap",
        "0-1",
    ),
    "scaffold/strength": Metric("share of the scaffold that is left (RuscaRL's lambda)", "0-1"),
    "scaffold/shown_mean": Metric("criteria shown to a natural rollout", "criteria"),
    "scaffold/dropped_criteria": Metric("criteria left out of scaffolds because the budget was full", "criteria"),
    "judge/calls": Metric("requests sent to the judge since the process began, retries included", "calls"),
    "judge/retries": Metric("those sent again after a failure of the transport", "calls"),
    "judge/cache_hits": Metric("verdicts found in the cache instead", "verdicts"),
    "judge/prompt_tokens": Metric("tokens the judge has read", "tokens"),
    "judge/completion_tokens": Metric("tokens the judge has written", "tokens"),
    "judge/latency_p95_s": Metric("latency that 95 % of the last answered calls did not exceed", "s"),
    "time/rollout": Metric("sampling natural rollouts", "s"),
    "time/guided_rollout": Metric("sampling guided rollouts", "s"),
    "time/grade": Metric("grading; with rollout.schedule overlapped, waiting for grades", "s"),
    "time/train": Metric("forward, backward, optimizer", "s"),
    "time/sync": Metric("handing the weights to the rollout engine, parity probe included", "s"),
    "time/evaluate": Metric("held-out evaluation, its grading included", "s"),
    "time/checkpoint": Metric("saving, after the step before this one", "s"),
    "time/step": Metric("the whole step by the clock", "s"),
    "tokens/generated": Metric("tokens sampled, natural and guided", "tokens"),
    "tokens/trained": Metric("response tokens in the updates of the step", "tokens"),
    "tokens_per_second": Metric("tokens sampled per second of the whole step", "tokens/s"),
    "memory/peak_gib": Metric(
        "peak so far, on the rank with most: on a GPU the tensors that torch counts, else the process's resident "
        "memory. torch goes on counting vLLM's weights and cache while vLLM sleeps and their memory is unmapped "
        "(vLLM's issue 33625): with both on one GPU this is their sum, which no moment holds and which may exceed the "
        "GPU's memory; `nvidia-smi` shows what is held. Counted from vLLM's start, which resets torch's peak",
        "GiB",
    ),
}
"""One line of metrics.jsonl holds every name; null where a step has no such value."""

EVAL_METRICS: dict[str, Metric] = {
    "step": Metric("rollout batches trained on before the evaluation; 0 is the untrained model", "steps"),
    "reward/mean": Metric("mean held-out reward, without guidance, sampled at evaluation.temperature", "reward, 0-1"),
    "score/mean": Metric("mean score before clipping to [0, 1] (HealthBench's own)", "score"),
    "length/mean": Metric("mean response length", "tokens"),
    "truncated": Metric("responses cut at the maximum length", "0-1"),
    "unknown_verdicts": Metric("criteria that the grader could not judge", "verdicts"),
    "ungraded_samples": Metric("answers left out because a verdict is unknown", "samples"),
    "samples": Metric("answers of the fixed cohort", "samples"),
    "loss": Metric("SFT alone: mean -log p of a token of the validation answers", "nats"),
    "criteria": Metric(
        "per criterion of the cohort: uid, criterion (index), text, weight, topic, failures (samples that miss it; a "
        "graded verdict counts 1 - value; a negative criterion fails by being met) and samples (judged)",
        "list",
    ),
}


def check_names(values: Iterable[str], known: Mapping[str, Metric]) -> None:
    """Raises ValueError for a name that is not in the table."""
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "add it to the table in rise_rl/metrics.py"
            raise ValueError(f"metric {name!r}: not a known name; {hint}")


def markdown() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m rise_rl.metrics > docs/metrics.md`. A run folder holds one JSON line per step in",
        "`metrics.jsonl` and one per held-out evaluation in `evals.jsonl`. Every line has every name; `null` means",
        "that the step has no such value (no guided rollouts, no evaluation) or that it was not finite.",
    ]
    for title, table in (("metrics.jsonl", METRICS), ("evals.jsonl", EVAL_METRICS)):
        lines += ["", f"## {title}", "", "| name | meaning | unit |", "|---|---|---|"]
        lines += [f"| `{name}` | {m.description.replace('|', chr(92) + '|')} | {m.unit} |" for name, m in table.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
