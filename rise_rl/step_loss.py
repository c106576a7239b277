"""From a step's graded samples to weighted training sequences (paper eq. 1, 7, 8, 11, 12)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rise_engine.sequences import TrainSequence
from rise_kernels.token_losses import LossSpec

from .advantages import group_advantages, overlong_penalty
from .config import Config, GrpoConfig, GuidanceConfig
from .guidance import guided_gains
from .samples import Sample
from .weights import StepWeights


@dataclass(frozen=True)
class StepLoss:
    """mini_batches: what each optimizer update learns from. advantages: one per natural sample (None: ungraded). gains:
    one per guided sample (0: filtered out).
    """

    mini_batches: list[list[TrainSequence]]
    advantages: list[float | None]
    penalties: list[float]
    gains: list[float]

    @property
    def sequences(self) -> list[TrainSequence]:
        return [s for mini_batch in self.mini_batches for s in mini_batch]


def build_step_loss(
    natural: Sequence[Sample],
    guided: Sequence[Sample],
    prompt_ids: dict[str, tuple[int, ...]],
    *,
    guide_coefficient: float,
    max_length: int,
    grpo: GrpoConfig,
    guidance: GuidanceConfig,
) -> StepLoss:
    """Every sequence that takes part in the step, with its token weight.

    Groups are whole in a mini-batch (`grpo.mini_batch_prompts` prompts in the order of prompt_ids), which has its own
    normalisers; advantages and gains do not depend on the split.
    prompt_ids: the *original* prompt of each uid; guided answers are learnt under it. Ungraded samples take no part
    anywhere; natural ones of advantage 0 do (they count in the denominators, and the engine need not forward them).
    With `guidance.coupled` guided answers are members of the group like natural ones, and there are no guide rows.
    """
    group = [*natural, *guided] if guidance.coupled else natural
    penalties = [
        overlong_penalty(s.length, max_length=max_length, buffer=grpo.overlong_buffer, factor=grpo.overlong_factor)
        for s in group
    ]
    shaped = [None if s.reward is None else s.reward + p for s, p in zip(group, penalties)]
    advantages = group_advantages(shaped, [s.example.uid for s in group])
    counted = [(s, a) for s, a in zip(group, advantages) if a is not None and not (grpo.mask_truncated and s.truncated)]

    gains = [0.0] * len(guided)
    for uid in prompt_ids:
        members = [i for i, s in enumerate(guided) if s.example.uid == uid]
        rewards = [None if guidance.drop_truncated and guided[i].truncated else guided[i].reward for i in members]
        baseline = [s.reward for s in natural if s.example.uid == uid]
        for i, gain in zip(members, guided_gains(rewards, baseline, guidance.gain_max)):
            gains[i] = gain
    kept = Counter(s.example.uid for s, gain in zip(guided, gains) if gain > 0)

    def mini_batch(uids: Sequence[str]) -> list[TrainSequence]:
        members = [(s, advantage) for s, advantage in counted if s.example.uid in uids]
        weights = StepWeights(
            natural_lengths=[s.length for s, _ in members],
            prompts=len(uids),
            guide_coefficient=guide_coefficient,
            aggregation=grpo.aggregation,
            norm_length=max_length,
        )
        sequences = [
            TrainSequence(
                uid=s.example.uid,
                prompt_ids=prompt_ids[s.example.uid],
                response_ids=s.rollout.token_ids,
                token_weight=weights.natural(s.length),
                advantage=advantage,
                coupled=s.kind == "guided",
                behaviour_logprob=own_logprobs(s, prompt_ids),
            )
            for s, advantage in members
        ]
        sequences += [
            TrainSequence(
                uid=s.example.uid,
                prompt_ids=prompt_ids[s.example.uid],
                response_ids=s.rollout.token_ids,
                token_weight=weights.guided(gain, s.length, kept[s.example.uid]),
                is_guide=True,
            )
            for s, gain in zip(guided, gains)
            if gain > 0 and s.example.uid in uids and not guidance.coupled
        ]
        return sequences

    uids = list(prompt_ids)
    size = grpo.mini_batch_prompts or len(uids)
    mini_batches = [mini_batch(uids[i : i + size]) for i in range(0, len(uids), size)]
    return StepLoss(mini_batches, advantages[: len(natural)], penalties[: len(natural)], gains)


def own_logprobs(sample: Sample, prompt_ids: dict[str, tuple[int, ...]]) -> tuple[float, ...] | None:
    """The engine's log-probs, if it sampled under the prompt that is learnt under (not scaffolded, not guided)."""
    return sample.rollout.logprobs if sample.rollout.prompt_ids == prompt_ids[sample.example.uid] else None


def loss_spec(config: Config) -> LossSpec:
    """The scalars of the token losses. Importance correction of whole sequences is not one of them (update.py)."""
    return LossSpec(
        gamma=config.guidance.gamma,
        clip_low=config.grpo.clip_low,
        clip_high=config.grpo.clip_high,
        dual_clip=config.grpo.dual_clip,
        kl_coef=config.grpo.kl_coef,
        kl_estimator=config.grpo.kl_estimator,
        is_cap=config.grpo.cap_of("token"),
        guide=config.guidance.loss,
    )
