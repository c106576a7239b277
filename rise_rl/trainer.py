"""RISE-RL, Algorithm 1 of the paper, top to bottom.

A step: sample natural answers, grade them, show the policy the criteria it keeps missing and sample guided answers,
keep those that beat the natural mean, and learn from both under the original prompts. Everything
random derives from (seed, step, uid, index) and everything remembered is in the run folder, so a killed run resumes
with the same numbers. On several ranks each samples and grades its own prompts; everything after that is computed
alike on all of them, from the gathered samples (ranks.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rise_engine.checkpoint import CheckpointError, CheckpointStore
from rise_engine.errors import EngineError
from rise_engine.memory import peak_memory_gib
from rise_engine.parity import parity_probe
from rise_engine.policy import PolicyEngine
from rise_engine.rollout.base import RolloutEngine, RolloutRequest, Sampling
from rise_engine.seeds import derive_seed

from .batches import PromptOrder
from .config import Config
from .data import Example
from .errors import RiseError
from .graders.base import Grader
from .phases import PhaseTimes
from .plateau import smooth
from .progress import Progress
from .ranks import Ranks, in_order, whole_step
from .run_folder import RunFolder
from .samples import Sample, grade_rollouts, require_graded
from .schedule import GuidanceSchedule
from .step_loss import build_step_loss
from .step_metrics import criterion_failures, judge_metrics, mean, sample_metrics, training_metrics
from .step_sampler import Prompt, StepSampler, heldout_sampling
from .update import Scorer, update

UNGRADED_LIMIT = 0.1
"""An evaluation with a larger share of ungraded answers cannot make a model the best: its mean is over what is left."""


class Trainer:
    """Owns a run from its first step to its last. `train()` returns when it is finished or asked to stop.

    order, heldout: prompts that are known to fit. reference: the frozen model of the KL term. run: opened for writing,
    its log ending where the policy stands.
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
        reference: Scorer | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        ranks: Ranks | None = None,
    ) -> None:
        self.config, self.policy, self.rollouts, self.grader = config, policy, rollouts, grader
        self.reference, self.order = reference, order
        self.heldout = list(heldout)[: config.evaluation.prompts]
        self.run, self.checkpoints, self.progress, self.should_stop = run, checkpoints, progress, should_stop
        self.ranks = ranks or Ranks()
        self.times = PhaseTimes()
        self.sampler = StepSampler(
            config,
            tokenizer=policy.tokenizer,
            rollouts=rollouts,
            grader=grader,
            progress=progress,
            times=self.times,
        )
        guidance = config.guidance
        self.schedule = GuidanceSchedule(guidance.enabled, guidance.remove_at, guidance.plateau)
        self.history: list[dict[str, Any]] = self.ranks.once(run.metrics)

    @property
    def done(self) -> int:
        """Steps done: rollout batches trained on. The policy counts optimizer updates."""
        return self.policy.step // self.config.grpo.updates_per_step

    # --- the run ---------------------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Runs the remaining steps. False if it was asked to stop before the last one (a checkpoint is saved). A judge
        that is down stops the run too, and what was trained until then is saved.
        """
        try:
            return self._train()
        except (RiseError, EngineError) as error:
            # Not in the middle of a step: some of its updates would be made again.
            whole = self.policy.step == self.done * self.config.grpo.updates_per_step
            if self._can_save(error) and whole and self.history and self.history[-1]["step"] == self.done:
                self.save()
            raise

    def _can_save(self, error: Exception) -> bool:
        return self.ranks.all_raise(error) and not isinstance(error, CheckpointError)

    def _train(self) -> bool:
        self.sync()
        # Step 0, or one whose evaluation failed after it was trained.
        if self._due(self.config.evaluation.every) and not self.ranks.once(self._evaluated):
            self.evaluate()
        self.times.take()
        while self.done < self.config.steps:
            started = time.perf_counter()
            metrics = self.step(self.done + 1)
            try:
                self.sync()
                if self._due(self.config.evaluation.every):
                    self.evaluate()
            except (RiseError, EngineError) as error:
                if self._can_save(error):
                    self._log(metrics, started)  # the step itself is whole
                raise
            self._log(metrics, started)
            stopping = self.ranks.any(self.should_stop())
            if stopping or self._due(self.config.checkpoint.every):
                self.save()
            if stopping:
                break
        return self.done >= self.config.steps

    def step(self, step: int) -> dict[str, Any]:
        """One step of Algorithm 1, up to the update; `step` counts from 1."""
        guiding = self.schedule.active(step - 1, [line["gap/raw"] for line in self.history])
        prompts = self.order.batch(step - 1)
        parts = self.ranks.gather(self.sampler.sample, step, self.ranks.mine(prompts), guiding=guiding)
        samples = whole_step(parts, prompts)
        natural, guided = samples.natural, samples.guided
        require_graded(natural, f"step {step}")
        coefficient = self.config.guidance.coefficient if guiding and not self.config.guidance.coupled else 0.0
        loss = build_step_loss(
            natural,
            guided,
            samples.prompts,
            guide_coefficient=coefficient,
            max_length=self.config.rollout.max_new_tokens,
            grpo=self.config.grpo,
            guidance=self.config.guidance,
        )
        with self.times("sync"):  # the other half of handing the GPU over
            self.rollouts.release()
        with self.times("train"):
            stats = update(
                self.policy,
                loss.mini_batches,
                temperature=self.config.rollout.temperature,
                reference=self.reference,
                sequence_cap=self.config.grpo.cap_of("sequence"),
            )
        self.ranks.once(self.run.write_rollouts, step, [sample.record() for sample in [*natural, *guided]])
        return {
            "step": step,
            "epoch": (step - 1) / self.order.steps_per_epoch,
            "guidance/active": guiding,
            "lambda": coefficient,
            **sample_metrics(natural, guided, loss),
            **samples.metrics,
            **training_metrics(stats, len(loss.sequences)),
        }

    # --- around the steps ------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Hands the trainer's weights to the rollout engine and proves that it has them."""
        with self.times("sync"):
            self.rollouts.sync(self.policy.step)
            parity_probe(self.rollouts, self.policy, tolerance=self.config.rollout.parity_tolerance)

    def evaluate(self) -> None:
        """Held-out answers without guidance on the fixed cohort; the best so far by mean reward is exported."""
        if not self.heldout or not self.config.evaluation.every:
            return
        with self.times("evaluate"):
            record = evaluate(
                self.heldout,
                self.rollouts,
                self.grader,
                heldout_sampling(self.config),
                prompt_of=lambda e: self.sampler.render(e.messages),
                samples=self.config.evaluation.samples,
                seed=self.config.seed,
                progress=self.progress,
                ranks=self.ranks,
            )
            record = {"step": self.done, **record}
            best = self.ranks.once(self.checkpoints.best)
            comparable = record["ungraded_samples"] <= UNGRADED_LIMIT * record["samples"]
            if comparable and (best is None or record["reward/mean"] > best["reward"]):
                self.checkpoints.save_best(self.policy, {"step": record["step"], "reward": record["reward/mean"]})
            self.ranks.once(self.run.log_eval, record)
        self.progress.evaluated(record)

    def _evaluated(self) -> bool:
        return any(record["step"] == self.done for record in self.run.evals())

    def save(self) -> None:
        with self.times("checkpoint"):
            self.checkpoints.save(self.policy)

    def _log(self, metrics: dict[str, Any], started: float) -> None:
        previous = self.history[-1] if self.history else {}
        metrics["reward/natural_smoothed"] = smooth(previous.get("reward/natural_smoothed"), metrics["reward/natural"])
        if metrics["guidance/active"]:
            metrics["gap/smoothed"] = smooth(previous.get("gap/smoothed"), metrics["gap/raw"])
        costs = self.ranks.gather(lambda: (peak_memory_gib(), getattr(self.grader, "judge_stats", None)))
        seconds = time.perf_counter() - started
        metrics.update({f"time/{phase}": spent for phase, spent in self.times.take().items()})
        metrics["time/step"] = seconds
        metrics["tokens_per_second"] = metrics["tokens/generated"] / seconds
        metrics["memory/peak_gib"] = max(memory for memory, _ in costs)
        metrics.update(judge_metrics([stats for _, stats in costs if stats is not None]))
        self.ranks.once(self.run.log_metrics, metrics)
        self.history.append(metrics)
        self.progress.stepped(metrics)

    def _due(self, every: int) -> bool:
        return self.done >= self.config.steps or (every > 0 and self.done % every == 0)


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
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Mean held-out reward and per-criterion failures; the seeds are the same at every evaluation. Each rank answers
    its own prompts, and the means are over all of them.
    """
    ranks = ranks or Ranks()

    def answer(examples: Sequence[Example]) -> list[Sample]:
        owners = [e for e in examples for _ in range(samples)]
        prompts = {e.uid: prompt_of(e) for e in examples}
        requests = [
            RolloutRequest(e.uid, i % samples, prompts[e.uid], derive_seed("evaluation", seed, e.uid, i % samples))
            for i, e in enumerate(owners)
        ]
        with progress.counting("evaluate", len(requests)) as advance:
            answers = rollouts.generate(requests, sampling, advance)  # also without any: it may be collective
        return grade_rollouts(grader, owners, answers) if answers else []

    graded = in_order((s for part in ranks.gather(answer, ranks.mine(examples)) for s in part), examples)
    require_graded(graded, "held-out evaluation")
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
