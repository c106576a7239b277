"""RISE-RL, Algorithm 1 of the paper, top to bottom.

A step: sample natural answers, grade them, show the policy the criteria it keeps missing and sample guided answers,
keep those that beat the natural mean, and take one optimizer step on both under the original prompts. Everything
random derives from (seed, step, uid, index) and everything remembered is in the run folder, so a killed run resumes
with the same numbers.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rise_engine.checkpoint import CheckpointStore
from rise_engine.memory import peak_memory_gib
from rise_engine.parity import parity_probe
from rise_engine.policy import PolicyEngine
from rise_engine.prompts import render_prompt
from rise_engine.rollout.base import RolloutEngine, RolloutRequest, Sampling
from rise_engine.seeds import derive_seed

from .batches import PromptOrder
from .config import Config
from .data import Example
from .errors import RiseError
from .graders.base import Grader
from .guidance import draw_template, guided_prompt, select_feedback
from .plateau import smooth
from .progress import Progress
from .run_folder import RunFolder
from .samples import Sample, grade_rollouts
from .schedule import GuidanceSchedule
from .step_loss import build_step_loss
from .step_metrics import criterion_failures, judge_metrics, mean, sample_metrics, training_metrics

Prompt = tuple[int, ...]

UNGRADED_LIMIT = 0.1
"""An evaluation with a larger share of ungraded answers cannot make a model the best: its mean is over what is left."""


class Trainer:
    """Owns a run from its first step to its last. `train()` returns when it is finished or asked to stop.

    order, heldout: prompts that are known to fit. run: opened for writing, its log ending where the policy stands.
    """

    def __init__(
        self,
        config: Config,
        *,
        policy: PolicyEngine,
        rollouts: RolloutEngine,
        grader: Grader,
        order: PromptOrder,
        heldout: Sequence[Example],
        run: RunFolder,
        checkpoints: CheckpointStore,
        progress: Progress,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self.policy, self.rollouts, self.grader = config, policy, rollouts, grader
        self.order = order
        self.heldout = list(heldout)[: config.evaluation.prompts]
        self.run, self.checkpoints, self.progress, self.should_stop = run, checkpoints, progress, should_stop
        self.sampling = Sampling(max_new_tokens=config.rollout.max_new_tokens, temperature=config.rollout.temperature)
        guidance = config.guidance
        self.schedule = GuidanceSchedule(guidance.enabled, guidance.remove_at, guidance.plateau)
        self.history: list[dict[str, Any]] = run.metrics()
        self.times: dict[str, float] = defaultdict(float)

    # --- the run ---------------------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Runs the remaining steps. False if it was asked to stop before the last one (a checkpoint is saved). A judge
        that is down stops the run too, and what was trained until then is saved.
        """
        try:
            return self._train()
        except RiseError:
            if self.history and self.history[-1]["step"] == self.policy.step:
                self.save()
            raise

    def _train(self) -> bool:
        self.sync()
        if self.policy.step == 0:
            self.evaluate()
        self.times.clear()
        while self.policy.step < self.config.steps:
            started = time.perf_counter()
            metrics = self.step(self.policy.step + 1)
            if self._due(self.config.evaluation.every):
                self.evaluate()
            self._log(metrics, started)
            stopping = self.should_stop()
            if stopping or self._due(self.config.checkpoint.every):
                self.save()
            if stopping:
                break
        return self.policy.step >= self.config.steps

    def step(self, step: int) -> dict[str, Any]:
        """One step of Algorithm 1; `step` counts from 1."""
        examples = self.order.batch(step - 1)
        prompts = {e.uid: self._render(e.messages) for e in examples}
        gaps = [line["gap/raw"] for line in self.history]
        guiding = self.schedule.active(step - 1, gaps)

        natural = self._sample_natural(step, examples, prompts)
        guided, guided_metrics = self._sample_guided(step, natural, prompts) if guiding else ([], {})

        coefficient = self.config.guidance.coefficient if guiding else 0.0
        loss = build_step_loss(
            natural,
            guided,
            prompts,
            guide_coefficient=coefficient,
            max_length=self.sampling.max_new_tokens,
            grpo=self.config.grpo,
            guidance=self.config.guidance,
        )
        with self._phase("train"):
            stats = self.policy.train_step(loss.sequences, temperature=self.sampling.temperature)
        self.sync()
        self.run.write_rollouts(step, [sample.record() for sample in [*natural, *guided]])
        return {
            "step": step,
            "epoch": (step - 1) / self.order.steps_per_epoch,
            "guidance/active": guiding,
            "lambda": coefficient,
            **sample_metrics(natural, guided, loss),
            **guided_metrics,
            **training_metrics(stats, len(loss.sequences)),
        }

    # --- answers ---------------------------------------------------------------------------------------------------

    def _sample_natural(self, step: int, examples: Sequence[Example], prompts: dict[str, Prompt]) -> list[Sample]:
        requests = [
            RolloutRequest(e.uid, i, prompts[e.uid], derive_seed("natural", self.config.seed, step, e.uid, i))
            for e in examples
            for i in range(self.config.grpo.group_size)
        ]
        owners = [e for e in examples for _ in range(self.config.grpo.group_size)]
        return self._answer("rollout", owners, requests)

    def _sample_guided(
        self, step: int, natural: Sequence[Sample], prompts: dict[str, Prompt]
    ) -> tuple[list[Sample], dict[str, int]]:
        """Eq. 4-6 for every prompt: feedback from its natural answers, privileged prompts, guided answers."""
        config, seed = self.config.guidance, self.config.seed
        groups: dict[str, list[Sample]] = defaultdict(list)
        for sample in natural:
            groups[sample.example.uid].append(sample)
        requests, owners, shown = [], [], []
        without_feedback = dropped = 0
        for uid, group in groups.items():
            example = group[0].example
            chosen = select_feedback(example.rubric, [s.verdicts for s in group], config.criteria)
            limit = len(prompts[uid]) + config.budget_tokens
            found = False
            for index in range(config.rollouts if chosen else 0):
                guided = guided_prompt(
                    example.messages,
                    example.rubric,
                    chosen,
                    template=draw_template(config.templates, seed=seed, step=step, uid=uid, index=index),
                    secrecy_wish=config.secrecy_wish,
                    fits=partial(self._fits, limit),
                )
                dropped += len(chosen) - (len(guided.shown) if guided else 0)
                if guided:
                    found = True
                    owners.append(example)
                    shown.append(guided.shown)
                    request_seed = derive_seed("guided", seed, step, uid, index)
                    requests.append(RolloutRequest(uid, index, self._render(guided.messages), request_seed))
            without_feedback += not found
        samples = self._answer("guided_rollout", owners, requests, shown) if requests else []
        return samples, {"guided/no_feedback_prompts": without_feedback, "guided/dropped_criteria": dropped}

    def _answer(
        self,
        phase: str,
        examples: Sequence[Example],
        requests: Sequence[RolloutRequest],
        shown: Sequence[tuple[int, ...]] | None = None,
    ) -> list[Sample]:
        with self._phase(phase), self.progress.counting(phase, len(requests)) as advance:
            rollouts = self.rollouts.generate(requests, self.sampling, advance)
        with self._phase("grade"):
            return grade_rollouts(self.grader, examples, rollouts, shown)

    def _fits(self, limit: int, messages: Sequence[Any]) -> bool:
        return len(self._render(messages)) <= limit

    def _render(self, messages: Sequence[Any]) -> Prompt:
        return render_prompt(self.policy.tokenizer, messages, self.config.data.chat_template)

    # --- around the steps ------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Hands the trainer's weights to the rollout engine and proves that it has them."""
        with self._phase("sync"):
            self.rollouts.sync(self.policy.step)
            parity_probe(self.rollouts, self.policy, tolerance=self.config.rollout.parity_tolerance)

    def evaluate(self) -> None:
        """Held-out answers without guidance on the fixed cohort; the best so far by mean reward is exported."""
        if not self.heldout or not self.config.evaluation.every:
            return
        with self._phase("evaluate"):
            record = evaluate(
                self.heldout,
                self.rollouts,
                self.grader,
                self.sampling,
                prompt_of=lambda e: self._render(e.messages),
                samples=self.config.evaluation.samples,
                seed=self.config.seed,
                progress=self.progress,
            )
            record = {"step": self.policy.step, **record}
            best = self.checkpoints.best()
            comparable = record["ungraded_samples"] <= UNGRADED_LIMIT * record["samples"]
            if comparable and (best is None or record["reward/mean"] > best["reward"]):
                self.checkpoints.save_best(self.policy, {"step": record["step"], "reward": record["reward/mean"]})
            self.run.log_eval(record)
        self.progress.evaluated(record)

    def save(self) -> None:
        with self._phase("checkpoint"):
            self.checkpoints.save(self.policy)

    def _log(self, metrics: dict[str, Any], started: float) -> None:
        previous = self.history[-1] if self.history else {}
        metrics["reward/natural_smoothed"] = smooth(previous.get("reward/natural_smoothed"), metrics["reward/natural"])
        if metrics["guidance/active"]:
            metrics["gap/smoothed"] = smooth(previous.get("gap/smoothed"), metrics["gap/raw"])
        seconds = time.perf_counter() - started
        metrics.update({f"time/{phase}": spent for phase, spent in self.times.items()})
        metrics["time/step"] = seconds
        metrics["tokens_per_second"] = metrics["tokens/generated"] / seconds
        metrics["memory/peak_gib"] = peak_memory_gib()
        metrics.update(judge_metrics(getattr(self.grader, "judge_stats", None)))
        self.times.clear()
        self.run.log_metrics(metrics)
        self.history.append(metrics)
        self.progress.stepped(metrics)

    def _due(self, every: int) -> bool:
        done = self.policy.step
        return done >= self.config.steps or (every > 0 and done % every == 0)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.times[name] += time.perf_counter() - started


def evaluate(
    examples: Sequence[Example],
    rollouts: RolloutEngine,
    grader: Grader,
    sampling: Sampling,
    *,
    prompt_of: Callable[[Example], Prompt],
    samples: int,
    seed: int,
    progress: Progress,
) -> dict[str, Any]:
    """Mean held-out reward and per-criterion failures; the seeds are the same at every evaluation."""
    owners = [e for e in examples for _ in range(samples)]
    prompts = {e.uid: prompt_of(e) for e in examples}
    requests = [
        RolloutRequest(e.uid, i % samples, prompts[e.uid], derive_seed("evaluation", seed, e.uid, i % samples))
        for i, e in enumerate(owners)
    ]
    with progress.counting("evaluate", len(requests)) as advance:
        answers = rollouts.generate(requests, sampling, advance)
    graded = grade_rollouts(grader, owners, answers)
    return {
        "reward/mean": mean(s.reward for s in graded),
        "score/mean": mean(s.example.rubric.score(s.verdicts) for s in graded),
        "length/mean": mean(s.length for s in graded),
        "truncated": mean(float(s.truncated) for s in graded),
        "unknown_verdicts": sum(v is None for s in graded for v in s.verdicts),
        "ungraded_samples": sum(s.reward is None for s in graded),
        "samples": len(graded),
        "criteria": criterion_failures(graded),
    }
