"""What a configuration asks of a model's context and of the ranks, known before any weight is loaded."""

from __future__ import annotations

from .config import Config, ConfigError


def check_context(config: Config, context_length: int, *, guidance: bool) -> None:
    """ConfigError unless the longest prompt, hint and answer fit the model together."""
    section = "scaffold" if config.scaffold.enabled else "guidance"
    needed = config.data.max_prompt_tokens + config.rollout.max_new_tokens + (config.hint_tokens if guidance else 0)
    if needed > context_length:
        parts = f"data.max_prompt_tokens + {f'{section}.budget_tokens + ' if guidance else ''}rollout.max_new_tokens"
        raise ConfigError(f"{parts} = {needed}, but {config.model} has a context of {context_length} tokens")


def check_ranks(config: Config, world_size: int, *, has_vllm: bool) -> None:
    """ConfigError for what cannot run on `world_size` ranks. has_vllm: what rollout.engine auto depends on."""
    if world_size > config.grpo.prompts_per_step:
        raise ConfigError(
            f"grpo.prompts_per_step: {config.grpo.prompts_per_step} prompts a step for {world_size} ranks, but each "
            "rank samples whole prompts and needs at least one"
        )
    by_transformers = config.rollout.engine == "transformers" or (config.rollout.engine == "auto" and not has_vllm)
    if world_size > 1 and config.engine.effective_zero_stage == 3 and by_transformers:
        raise ConfigError(
            f"engine.zero_stage: 3 on {world_size} ranks, but the rollouts are sampled by transformers from the "
            "trainer's own weights, which stage 3 splits over ranks that finish at different times; use stage 2, or "
            "vLLM"
        )
