"""The first half of a step: natural answers, their grades, and guided answers to what they keep missing (eq. 3-6)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from rise_engine.prompts import render_prompt
from rise_engine.rollout.base import RolloutEngine, RolloutRequest, Sampling
from rise_engine.seeds import derive_seed

from .config import Config
from .data import Example
from .graders.base import Grader
from .guidance import draw_template, guided_prompt, select_feedback
from .phases import PhaseTimes
from .progress import Progress
from .samples import Sample, grade_rollouts

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class StepSamples:
    """prompts: the original prompt of every uid. metrics: counts about the hints."""

    prompts: dict[str, Prompt]
    natural: list[Sample]
    guided: list[Sample]
    metrics: dict[str, int] = field(default_factory=dict)


class StepSampler:
    """Samples and grades the answers of a step. Every seed is a function of (seed, step, uid, index)."""

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: PreTrainedTokenizerBase,
        rollouts: RolloutEngine,
        grader: Grader,
        progress: Progress,
        times: PhaseTimes,
    ) -> None:
        self.config, self.tokenizer, self.rollouts, self.grader = config, tokenizer, rollouts, grader
        self.progress, self.times = progress, times
        self.sampling = Sampling(max_new_tokens=config.rollout.max_new_tokens, temperature=config.rollout.temperature)

    def sample(self, step: int, examples: Sequence[Example], *, guiding: bool) -> StepSamples:
        """`step` counts from 1. Without `guiding` no guided answer is generated at all."""
        prompts = {e.uid: self.render(e.messages) for e in examples}
        natural = self._natural(step, examples, prompts)
        guided, metrics = self._guided(step, natural, prompts) if guiding else ([], {})
        return StepSamples(prompts, natural, guided, metrics)

    def render(self, messages: Sequence[Any]) -> Prompt:
        return render_prompt(self.tokenizer, messages, self.config.data.chat_template)

    def _natural(self, step: int, examples: Sequence[Example], prompts: dict[str, Prompt]) -> list[Sample]:
        requests = [
            RolloutRequest(e.uid, i, prompts[e.uid], derive_seed("natural", self.config.seed, step, e.uid, i))
            for e in examples
            for i in range(self.config.grpo.group_size)
        ]
        owners = [e for e in examples for _ in range(self.config.grpo.group_size)]
        return self._answer("rollout", owners, requests)

    def _guided(
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
                    requests.append(RolloutRequest(uid, index, self.render(guided.messages), request_seed))
            without_feedback += not found
        samples = self._answer("guided_rollout", owners, requests, shown) if requests else []
        return samples, {"guided/no_feedback_prompts": without_feedback, "guided/dropped_criteria": dropped}

    def _fits(self, limit: int, messages: Sequence[Any]) -> bool:
        return len(self.render(messages)) <= limit

    def _answer(
        self,
        phase: str,
        examples: Sequence[Example],
        requests: Sequence[RolloutRequest],
        shown: Sequence[tuple[int, ...]] | None = None,
    ) -> list[Sample]:
        with self.times(phase), self.progress.counting(phase, len(requests)) as advance:
            rollouts = self.rollouts.generate(requests, self.sampling, advance)
        with self.times("grade"):
            return grade_rollouts(self.grader, examples, rollouts, shown)
