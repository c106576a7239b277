"""What is done with a model outside training: sampling, evaluation on a prompt file, export of a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rise_engine.checkpoint import CheckpointStore
from rise_engine.files import new_folder
from rise_engine.frozen import FrozenPolicy
from rise_engine.loading import load_tokenizer
from rise_engine.parity import parity_probe
from rise_engine.policy import PolicyEngine
from rise_engine.prompts import render_prompt
from rise_engine.rollout.base import RolloutRequest, Sampling
from rise_engine.rollout.transformers import TransformersRollout
from rise_engine.seeds import derive_seed

from .config import Config, ConfigError
from .data import load_examples
from .fetch import find_model, resolve_model
from .graders.base import Message
from .launch import blaming, fitting, grader_for
from .limits import check_context
from .progress import Progress
from .rollout_choice import choose, make_rollouts
from .run_folder import RunFolder, RunFolderError
from .sft_config import run_config
from .step_sampler import heldout_sampling
from .trainer import evaluate


def token_counter(model: str) -> Callable[[Sequence[Message]], int]:
    """Counts the tokens of a conversation as the model's chat template renders it."""
    tokenizer = load_tokenizer(find_model(model))
    return lambda messages: len(render_prompt(tokenizer, messages))


def sample_answers(model: str, prompt: str, *, n: int, max_new_tokens: int, temperature: float, seed: int) -> list[str]:
    """n answers to one user message; temperature 0 is greedy."""
    if not prompt.strip():
        raise ConfigError("prompt: expected some text, found none")
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    with blaming("model"):
        policy = FrozenPolicy(find_model(model), dtype=dtype)
    rollouts = TransformersRollout(policy)
    rollouts.sync(policy.step)
    with blaming("model"):
        ids = render_prompt(policy.tokenizer, [{"role": "user", "content": prompt}])
    requests = [RolloutRequest("sample", i, ids, derive_seed("sample", seed, i)) for i in range(n)]
    with blaming("sample"):
        answers = rollouts.generate(requests, Sampling(max_new_tokens=max_new_tokens, temperature=temperature))
    return [answer.text for answer in answers]


def evaluate_model(config: Config, console: Console) -> dict[str, Any]:
    """Held-out evaluation of `config.model` as it stands, exactly as during training."""
    if not config.data.heldout:
        raise ConfigError("data.heldout: expected a file of prompts to evaluate on, found null")
    examples = load_examples(config.data.heldout)
    grader = grader_for({config.data.heldout: examples}, judge=config.judge, plugin=config.grader)
    with blaming("model"):
        policy = FrozenPolicy(find_model(config.model), dtype=config.engine.torch_dtype)
    check_context(config, policy.context_length, guidance=False)
    examples = fitting(examples, policy.tokenizer, config.data, console, config.data.heldout)
    choice = choose(config, policy)
    console.print(str(choice), highlight=False)
    with blaming("rollout"):
        rollouts = make_rollouts(choice, config, policy)
    rollouts.sync(policy.step)
    parity_probe(rollouts, policy, tolerance=config.rollout.parity_tolerance)
    with Progress(0, console=console) as progress:
        return evaluate(
            examples[: config.evaluation.prompts],
            rollouts,
            grader,
            heldout_sampling(config),
            prompt_of=lambda e: render_prompt(policy.tokenizer, e.messages, config.data.chat_template),
            samples=config.evaluation.samples,
            seed=config.seed,
            progress=progress,
        )


def export_run(run: Path, folder: Path, *, best: bool) -> Path:
    """A run's last checkpoint (or its best model) as a plain transformers folder. `folder` must not exist."""
    if folder.exists():
        raise RunFolderError(f"{folder}: already there; name a folder that does not exist yet")
    config = run_config(RunFolder(run))
    store = CheckpointStore(RunFolder(run).checkpoints)
    if best:
        if store.best() is None:
            raise RunFolderError(f"{run}: no best model; it is kept when the run evaluates on held-out prompts")
        with new_folder(folder) as aside:
            for path in store.best_folder().iterdir():
                shutil.copyfile(path, aside / path.name)
        return folder
    if store.latest() is None:
        raise RunFolderError(f"{run}: no checkpoint to export")
    policy = PolicyEngine(resolve_model(config.model), config.engine, seed=config.seed)
    store.load_latest(policy)
    policy.export(folder)
    return folder
