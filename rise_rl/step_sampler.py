"""The first half of a step: natural answers, their grades, and guided answers to what they keep missing (eq. 3-6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from rise_engine.prompts import render_prompt
from rise_engine.rollout.base import RolloutEngine, RolloutRequest, Sampling
from rise_engine.seeds import derive_seed

from .config import Config, RolloutConfig
from .data import Example
from .graders.base import Grader
from .guidance import draw_template, guided_prompt, select_feedback
from .phases import PhaseTimes
from .progress import Progress
from .samples import Sample
from .scaffold import draw_criteria, scaffolded, shown_count, strength
from .schedules import Asked, Lockstep, Overlapped

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class StepSamples:
    """prompts: the original prompt of every uid. metrics: counts about the hints."""

    prompts: dict[str, Prompt]
    natural: list[Sample]
    guided: list[Sample]
    metrics: dict[str, float] = field(default_factory=dict)


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
        self.config, self.tokenizer = config, tokenizer
        self.sampling = training_sampling(config.rollout)
        schedule = {"lockstep": Lockstep, "overlapped": Overlapped}[config.rollout.schedule]
        self.schedule = schedule(rollouts, grader, self.sampling, progress, times)

    def sample(self, step: int, examples: Sequence[Example], *, guiding: bool) -> StepSamples:
        """`step` counts from 1. Without `guiding` no guided answer is generated at all."""
        prompts = {e.uid: self.render(e.messages) for e in examples}
        asked, metrics = self._natural(step, examples, prompts)
        hints = {"guided/no_feedback_prompts": 0, "guided/dropped_criteria": 0}

        def guide(group: Sequence[Sample]) -> list[Asked]:
            guided, dropped = self._guided(step, group, prompts)
            hints["guided/no_feedback_prompts"] += not guided
            hints["guided/dropped_criteria"] += dropped
            return guided

        natural, guided = self.schedule(asked, guide if guiding else None)
        return StepSamples(prompts, natural, guided, metrics | hints if guiding else metrics)

    def render(self, messages: Sequence[Any]) -> Prompt:
        return render_prompt(self.tokenizer, messages, self.config.data.chat_template)

    def _natural(
        self, step: int, examples: Sequence[Example], prompts: dict[str, Prompt]
    ) -> tuple[list[Asked], dict[str, float]]:
        owners = [(e, i) for e in examples for i in range(self.config.grpo.group_size)]
        asked = [prompts[e.uid] for e, _ in owners]
        shown: list[tuple[int, ...]] = [()] * len(owners)
        metrics: dict[str, float] = {}
        if self.config.scaffold.enabled:
            asked, shown, metrics = self._scaffold(step, owners, prompts)
        seeds = [derive_seed("natural", self.config.seed, step, e.uid, i) for e, i in owners]
        requests = [RolloutRequest(e.uid, i, p, seed) for (e, i), p, seed in zip(owners, asked, seeds)]
        return [Asked(e, request, s) for (e, _), request, s in zip(owners, requests, shown)], metrics

    def _scaffold(
        self, step: int, owners: Sequence[tuple[Example, int]], prompts: dict[str, Prompt]
    ) -> tuple[list[Prompt], list[tuple[int, ...]], dict[str, float]]:
        """RuscaRL: the prompt and the shown criteria of every natural rollout. Those drawn last are left out where the
        budget is full.
        """
        config = self.config.scaffold
        level = strength(step, self.config.steps, steepness=config.steepness, midpoint=config.midpoint)
        asked, shown, dropped = [], [], 0
        for e, i in owners:
            count = shown_count(len(e.rubric), level, i, self.config.grpo.group_size)
            chosen = draw_criteria(e.rubric, count, seed=self.config.seed, step=step, uid=e.uid, index=i)
            limit = len(prompts[e.uid]) + config.budget_tokens
            while chosen and not self._fits(limit, scaffolded(e.messages, e.rubric, chosen)):
                chosen.pop()
                dropped += 1
            asked.append(self.render(scaffolded(e.messages, e.rubric, chosen)))
            shown.append(tuple(chosen))
        metrics = {"scaffold/strength": level, "scaffold/dropped_criteria": dropped}
        return asked, shown, metrics | {"scaffold/shown_mean": sum(map(len, shown)) / len(shown)}

    def _guided(self, step: int, group: Sequence[Sample], prompts: dict[str, Prompt]) -> tuple[list[Asked], int]:
        """Eq. 4-6 for one prompt: feedback from its natural answers, privileged prompts. Also returns how many criteria
        were left out for lack of room.
        """
        config, seed, example = self.config.guidance, self.config.seed, group[0].example
        uid = example.uid
        chosen = select_feedback(example.rubric, [s.verdicts for s in group], config.criteria)
        limit = len(prompts[uid]) + config.budget_tokens
        asked, dropped = [], 0
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
                request_seed = derive_seed("guided", seed, step, uid, index)
                request = RolloutRequest(uid, index, self.render(guided.messages), request_seed)
                asked.append(Asked(example, request, guided.shown))
        return asked, dropped

    def _fits(self, limit: int, messages: Sequence[Any]) -> bool:
        return len(self.render(messages)) <= limit


def training_sampling(config: RolloutConfig) -> Sampling:
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        subset=config.subset_sampling,
    )


def heldout_sampling(config: Config) -> Sampling:
    """From the whole distribution, at a temperature of its own, so that methods compare."""
    return Sampling(max_new_tokens=config.rollout.max_new_tokens, temperature=config.evaluation.temperature)
