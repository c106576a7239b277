"""Who samples: vLLM where it can, transformers elsewhere, and the run says which and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rise_engine.frozen import FrozenPolicy
from rise_engine.policy import PolicyEngine
from rise_engine.rollout.base import RolloutEngine
from rise_engine.rollout.transformers import TransformersRollout
from rise_engine.rollout.vllm_start import version, why_not

from .config import Config, ConfigError


@dataclass(frozen=True)
class Choice:
    engine: Literal["vllm", "transformers"]
    reason: str

    def __str__(self) -> str:
        return f"rollouts by {self.engine}: {self.reason}"


def choose(config: Config, policy: PolicyEngine | FrozenPolicy) -> Choice:
    """The same on every rank. ConfigError where vLLM is asked for and missing, or cannot serve the model."""
    wanted = config.rollout.engine
    if wanted == "transformers":
        return Choice("transformers", "asked for by rollout.engine")
    obstacle = why_not(policy)
    if obstacle is None:
        return Choice("vllm", f"version {version()}, {why_vllm(wanted, policy.device.type)}")
    if wanted == "vllm":
        raise ConfigError(f"rollout.engine: vllm, but {obstacle}; use transformers, or auto")
    return Choice("transformers", obstacle)


def why_vllm(wanted: str, device: str) -> str:
    if wanted == "vllm":
        return "asked for by rollout.engine"
    return "installed" if device == "cuda" else "installed; on a CPU transformers can be as fast (docs/rollouts.md)"


def make_rollouts(choice: Choice, config: Config, policy: PolicyEngine | FrozenPolicy) -> RolloutEngine:
    """The chosen engine on the policy's weights. Collective, and with vLLM a matter of seconds to minutes."""
    if choice.engine == "transformers":
        return TransformersRollout(policy, max_rows=config.rollout.max_rows)
    from rise_engine.rollout.vllm import VllmRollout

    return VllmRollout(
        policy,
        context_length=longest(config),
        max_rows=config.rollout.max_rows,
        subset=config.rollout.subset_sampling,
        config=config.rollout.vllm,
    )


def longest(config: Config) -> int:
    """Tokens of the longest prompt, hint and answer together."""
    return config.data.max_prompt_tokens + config.hint_tokens + config.rollout.max_new_tokens
