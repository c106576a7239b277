"""What the tests of vLLM share: few engines, each serving many policies of its model in turn."""

from __future__ import annotations

import os
import random
import signal

import numpy
import torch

from rise_engine.config import EngineConfig
from rise_engine.policy import PolicyEngine
from rise_engine.rollout.base import RolloutRequest, Sampling
from rise_engine.rollout.vllm import VllmRollout
from rise_engine.rollout.vllm_config import VllmConfig

CONTEXT = 200
BESIDE_OTHERS = VllmConfig(sleep=0, memory_fraction=0.2)
"""Several engines in one process: on a GPU they share it, and only one could sleep."""


def process_state() -> dict[str, object]:
    """What a start of vLLM must leave as it was."""
    return {
        "random": random.getstate(),
        "numpy": numpy.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "environment": {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")},
        "signals": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)],
        "threads": (torch.set_num_threads, torch.get_num_threads()),
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
    }


def a_policy(folder, **keys) -> PolicyEngine:
    return PolicyEngine(folder, EngineConfig(**{"lr": 1e-2, "warmup_steps": 0, **keys}))


def attach(rollouts: VllmRollout, policy: PolicyEngine) -> VllmRollout:
    """The engine as it would be in a run of `policy`, before the first sync."""
    rollouts.policy = rollouts.weights.policy = policy
    rollouts.weights.version = None
    return rollouts


def some_requests(count: int = 4, seed: int = 0) -> list[RolloutRequest]:
    """Prompts shorter and longer than a block of the prefix cache, several answers to each."""
    prompts = {"short": (5, 6, 7), "long": tuple(range(10, 80)), "one": (40,)}
    return [
        RolloutRequest(u, i, p, seed=1000 * seed + 100 * len(p) + i) for u, p in prompts.items() for i in range(count)
    ]


def gaps(rollouts: VllmRollout, temperature: float = 1.0) -> torch.Tensor:
    """|engine - trainer| log-prob of every sampled token."""
    found = rollouts.generate(some_requests(), Sampling(24, temperature))
    trainer = [rollouts.policy.logprobs(r.prompt_ids, [r.token_ids], temperature=temperature)[0] for r in found]
    return torch.cat([torch.tensor(r.logprobs) - t for r, t in zip(found, trainer)]).abs()


def assert_close(found: torch.Tensor) -> None:
    assert found.max() <= 1e-3
    assert found.mean() <= 1e-4
