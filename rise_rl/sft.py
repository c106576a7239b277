"""Supervised fine-tuning on the answers of a data file, on the engine that the other methods run on.

The loss of a step is the mean of -log p over the tokens of its answers: guide rows of equal weight with the "logprob"
loss. Batches are a function of (seed, step), so a resumed run goes on with the same numbers.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from rise_engine.checkpoint import CheckpointError, CheckpointStore
from rise_engine.distributed import all_ranks_sum
from rise_engine.errors import EngineError
from rise_engine.memory import peak_memory_gib
from rise_engine.policy import PolicyEngine
from rise_engine.prompts import render_prompt
from rise_engine.seeds import derive_seed
from rise_engine.sequences import TrainSequence
from rise_kernels.token_losses import LossSpec

from .batches import PromptOrder, enough
from .config import ConfigError
from .data import DataError, Example, load_examples
from .errors import RiseError
from .fetch import find_model, resolve_model
from .launch import Interrupted, blaming, check_prompts, enter, fitting, go_back, stop_signals
from .progress import number
from .ranks import Ranks
from .run_folder import RunFolder
from .sft_config import SftConfig, SftDataConfig
from .step_metrics import training_metrics
from .update import my_share, update


def run_sft(config: SftConfig, *, resume: bool = False, console: Console | None = None) -> Path:
    """Runs (or resumes) a supervised run and returns its folder. Collective; raises Interrupted after Ctrl-C, once
    saved.
    """
    ranks = Ranks.join(timedelta(minutes=config.engine.timeout_minutes))
    console = (console or Console()) if ranks.first else Console(quiet=True)
    train, validation = ranks.each(load_split, config)
    ranks.once(find_model, config.model)
    model = ranks.each(resolve_model, config.model)
    folder = Path(config.output) / config.name
    run = ranks.once(RunFolder.resume if resume else RunFolder.new, folder, config)
    with ExitStack() as stack:
        ranks.once(enter, stack, run.exclusive())
        with blaming("model"):
            policy = PolicyEngine(model, config.engine, loss=LossSpec(guide="logprob"), seed=config.seed)
        needed = config.data.max_prompt_tokens + config.data.max_answer_tokens
        if needed > policy.context_length:
            raise ConfigError(
                f"data.max_prompt_tokens + data.max_answer_tokens = {needed}, but {config.model} has a context of "
                f"{policy.context_length} tokens"
            )
        train, validation = (
            ranks.each(fitting, part, policy.tokenizer, config.data, console, config.data.train)
            for part in (train, validation)
        )
        trainer = SftTrainer(config, policy, train, validation, run, ranks, console)
        checkpoints = CheckpointStore(run.checkpoints, keep=config.checkpoint.keep)
        if resume:
            go_back(run, checkpoints, policy, console, trainer.steps, 1, ranks)
        else:
            ranks.once(run.begin)
        ranks.once(enter, stack, run)
        stopped = stack.enter_context(stop_signals(console))
        finished = trainer.train(checkpoints, should_stop=lambda: bool(stopped))
    if not finished:
        raise Interrupted(folder)
    return folder


def load_split(config: SftConfig) -> tuple[list[Example], list[Example]]:
    """Training and validation rows, each with an answer: data.heldout, or a share of data.train drawn by the seed."""
    train = with_answers(config.data.train, config.data.answer)
    if config.data.heldout:
        heldout = with_answers(config.data.heldout, config.data.answer)
        check_prompts(config.data, train, heldout, at_least=config.answers_per_step, key="answers_per_step")
        return train, heldout
    count = max(1, round(config.data.validation * len(train)))
    if count >= len(train):
        raise ConfigError(f"data.validation: {count} of {len(train)} rows would leave nothing to train on")
    chosen = set(random.Random(derive_seed("validation", config.seed)).sample(range(len(train)), count))
    rest = [e for i, e in enumerate(train) if i not in chosen]
    enough(rest, config.answers_per_step, "answers_per_step")
    return rest, [train[i] for i in sorted(chosen)]


def with_answers(source: str, column: str) -> list[Example]:
    """Raises DataError for a row without text in `column`."""
    examples = load_examples(source)
    for example in examples:
        found = example.meta.get(column)
        if not isinstance(found, str) or not found.strip():
            raise DataError(
                f"prompt {example.uid!r}: expected an answer (text), found {found!r}", file=source, field=column
            )
    return examples


def demonstrations(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: SftDataConfig, stop_id: int
) -> dict[str, TrainSequence]:
    """Prompt and answer tokens of each uid, the stop token last, at weight 0. An answer over data.max_answer_tokens
    stops the run or is left out, as data.overlong_prompt says.
    """
    found = {}
    for example in examples:
        answer = tokenizer(str(example.meta[config.answer]), add_special_tokens=False, verbose=False).input_ids
        response = (*answer, stop_id)
        if len(response) <= config.max_answer_tokens:
            prompt = render_prompt(tokenizer, example.messages, config.chat_template)
            found[example.uid] = TrainSequence(example.uid, prompt, response, token_weight=0.0, is_guide=True)
        elif config.overlong_prompt == "error":
            raise DataError(
                f"answer to {example.uid!r} has {len(response)} tokens, more than data.max_answer_tokens "
                f"({config.max_answer_tokens}); raise the limit or set data.overlong_prompt=drop",
                file=config.train,
            )
    if not found:
        raise DataError("no answer is short enough to use", file=config.train)
    return found


class SftTrainer:
    """steps: of all epochs; what does not fill a batch at an epoch's end is left out of that epoch. logged: the last
    step that was done here and is in the log.
    """

    def __init__(
        self,
        config: SftConfig,
        policy: PolicyEngine,
        train: Sequence[Example],
        validation: Sequence[Example],
        run: RunFolder,
        ranks: Ranks,
        console: Console,
    ) -> None:
        self.config, self.policy, self.run, self.ranks, self.console = config, policy, run, ranks, console
        stop_id = policy.tokenizer.eos_token_id
        stop_id = policy.stop_ids[0] if stop_id is None else stop_id
        self.rows = ranks.each(demonstrations, train, policy.tokenizer, config.data, stop_id)
        held = ranks.each(demonstrations, validation, policy.tokenizer, config.data, stop_id)
        self.validation = list(held.values())
        kept = [e for e in train if e.uid in self.rows]
        self.order = PromptOrder(
            kept, config.answers_per_step, config.seed, config.data.shuffle, key="answers_per_step"
        )
        self.steps = config.epochs * self.order.steps_per_epoch
        self.logged: int | None = None

    def train(self, checkpoints: CheckpointStore, *, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Runs the remaining steps. False if it was asked to stop before the last one. A checkpoint is saved then, and
        also when an error that all ranks know about (a loss that is not finite, say) ends the run between two steps.
        """
        try:
            while self.policy.step < self.steps and not self.ranks.any(should_stop()):
                self.step()
                last, every = self.policy.step == self.steps, self.config.checkpoint.every
                if last or (every and self.policy.step % every == 0):
                    checkpoints.save(self.policy)
        except (RiseError, EngineError) as error:
            known = self.ranks.all_raise(error) and not isinstance(error, CheckpointError)
            if known and self.logged == self.policy.step:
                checkpoints.save(self.policy)
            raise
        if self.policy.step < self.steps:
            checkpoints.save(self.policy)
        return self.policy.step == self.steps

    def step(self) -> None:
        """One optimizer update, its line in metrics.jsonl, and the validation losses that are due."""
        started = time.perf_counter()
        if self.policy.step == 0:
            self.validate()
        step = self.policy.step + 1
        sequences = self.batch(step)
        stats = update(self.policy, [sequences], temperature=1.0)
        if step % self.config.validate_every == 0 or step == self.steps:
            self.validate()
        metrics = {
            "step": step,
            "epoch": (step - 1) / self.order.steps_per_epoch,
            **training_metrics(stats, len(sequences)),
            "time/train": stats.seconds,
            "time/step": time.perf_counter() - started,
            "memory/peak_gib": peak_memory_gib(),
        }
        self.ranks.once(self.run.log_metrics, metrics)
        self.logged = step
        self.say(f"step {step}/{self.steps}  loss {number(metrics['loss'])}  {metrics['time/step']:.1f} s")

    def batch(self, step: int) -> list[TrainSequence]:
        """The answers of step `step` (from 1), every token of weight 1 / (tokens of the batch)."""
        rows = [self.rows[e.uid] for e in self.order.batch(step - 1)]
        weight = 1.0 / sum(len(r.response_ids) for r in rows)
        return [TrainSequence(r.uid, r.prompt_ids, r.response_ids, weight, is_guide=True) for r in rows]

    def validate(self) -> None:
        """Mean -log p of a validation token at temperature 1, on every rank the same."""
        scored = self.policy.score(my_share(self.validation, self.policy), temperature=1.0)
        sums = torch.zeros(2, dtype=torch.float64, device=self.policy.device)
        for logprob in scored:
            sums += torch.tensor([-logprob.double().sum().item(), len(logprob)], device=sums.device)
        total, tokens = all_ranks_sum(sums).tolist()
        if not math.isfinite(total):
            raise DataError("the validation loss is not finite", file=self.config.data.train)
        record: dict[str, Any] = {"step": self.policy.step, "loss": total / tokens, "samples": len(self.validation)}
        self.ranks.once(self.run.log_eval, record)
        self.say(f"validation loss after step {record['step']}: {record['loss']:.4f}")

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)
