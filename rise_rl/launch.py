"""From a configuration to a finished run: data, grader, policy, rollouts and run folder put together."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from rise_engine.checkpoint import CheckpointStore
from rise_engine.policy import PolicyEngine
from rise_engine.prompts import render_prompt
from rise_engine.reference import reference_of
from rise_engine.rollout.vllm_start import installed

from .batches import PromptOrder, enough
from .config import Config, ConfigError, DataConfig
from .data import DataError, Example, load_examples
from .errors import RiseError
from .fetch import find_model, resolve_model
from .graders.base import Grader
from .graders.judge_config import JudgeConfig
from .graders.plugin import load_grader
from .graders.routing import RoutingGrader
from .graders.rule import RuleGrader
from .limits import check_context, check_ranks
from .progress import Progress
from .ranks import Ranks
from .rollout_choice import choose, make_rollouts
from .run_folder import RunFolder
from .scaffold import scaffolded
from .step_loss import loss_spec
from .trainer import Trainer


class Interrupted(Exception):
    """The run was asked to stop; its checkpoint is saved."""


@contextmanager
def blaming(key: str) -> Iterator[None]:
    """A ValueError of a component says what is wrong with the configuration key that named it."""
    try:
        yield
    except RiseError:
        raise
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def grader_for(
    sources: Mapping[str, Sequence[Example]], *, judge: JudgeConfig | None, plugin: str | None = None
) -> Grader:
    """The grader the data needs: one's own, or rules and judge by each criterion's tag. sources: the examples of each
    file. ConfigError, before anything heavy is loaded, if a criterion has nobody to judge it.
    """
    if plugin:
        with blaming("grader"):
            return load_grader(plugin)
    llm: Grader | None = None
    if judge is not None:
        from .graders.llm import LlmGrader

        llm = LlmGrader(judge)
    grader = RoutingGrader(rule=RuleGrader(), llm=llm)
    for source, examples in sources.items():
        with blaming(source):
            grader.require(examples)
    return grader


def check_scaffold(config: Config, tokenizer: object, example: Example) -> None:
    """ConfigError where the model's chat template has no place for the system message that shows the criteria."""
    shown = scaffolded(example.messages, example.rubric, [0])
    try:
        lost = render_prompt(tokenizer, shown, config.data.chat_template) == render_prompt(
            tokenizer, example.messages, config.data.chat_template
        )
        why = "leaves system messages out" if lost else None
    except ValueError as error:
        why = str(error)
    if why:
        raise ConfigError(
            f"scaffold.enabled: criteria are shown in a system message, for which the chat template of {config.model} "
            f"has no place ({why}); use a model whose template has a system role"
        )


def fitting(
    examples: Sequence[Example], tokenizer: object, config: DataConfig, console: Console, source: str
) -> list[Example]:
    """The examples whose prompt is within data.max_prompt_tokens; others stop the run or are dropped and counted."""
    kept = []
    for example in examples:
        try:
            length = len(render_prompt(tokenizer, example.messages, config.chat_template))
        except ValueError as error:
            raise DataError(f"prompt {example.uid!r}: {error}", file=source) from error
        if length <= config.max_prompt_tokens:
            kept.append(example)
        elif config.overlong_prompt == "error":
            raise DataError(
                f"prompt {example.uid!r} has {length} tokens, more than data.max_prompt_tokens "
                f"({config.max_prompt_tokens}); raise the limit or set data.overlong_prompt=drop",
                file=source,
            )
    if len(kept) < len(examples):
        console.print(f"{source}: dropped {len(examples) - len(kept)} of {len(examples)} prompts as too long")
    if not kept:
        raise DataError("no prompt is short enough to use", file=source)
    return kept


def run_training(config: Config, *, resume: bool = False, console: Console | None = None) -> Path:
    """Runs (or resumes) a training run and returns its folder; on all ranks of a launch together. Raises Interrupted
    after Ctrl-C, once saved.
    """
    ranks = Ranks.join(timedelta(minutes=config.engine.timeout_minutes))
    console = (console or Console()) if ranks.first else Console(quiet=True)
    check_ranks(config, ranks.world_size, has_vllm=installed())
    train, heldout, grader = ranks.each(data_and_grader, config)
    ranks.once(find_model, config.model)
    model = ranks.each(resolve_model, config.model)
    folder = Path(config.output) / config.name
    run = ranks.once(RunFolder.resume if resume else RunFolder.new, folder, config)
    with ExitStack() as stack:
        ranks.once(enter, stack, run.exclusive())
        with blaming("model"):
            policy = PolicyEngine(model, config.engine, loss=loss_spec(config), seed=config.seed)
            reference = reference_of(model, policy) if config.grpo.kl_coef else None
        ranks.each(check_context, config, policy.context_length, guidance=config.hints)
        train = ranks.each(fitting, train, policy.tokenizer, config.data, console, config.data.train)
        if heldout:
            source = str(config.data.heldout)
            heldout = ranks.each(fitting, heldout, policy.tokenizer, config.data, console, source)
        order = PromptOrder(train, config.grpo.prompts_per_step, config.seed, config.data.shuffle)

        if config.scaffold.enabled:
            ranks.each(check_scaffold, config, policy.tokenizer, train[0])

        choice = ranks.each(choose, config, policy)
        checkpoints = CheckpointStore(run.checkpoints, keep=config.checkpoint.keep)
        done = 0
        if resume:
            done = go_back(run, checkpoints, policy, console, config.steps, config.grpo.updates_per_step, ranks)
        console.print(str(choice), highlight=False)
        with blaming("rollout"):
            rollouts = make_rollouts(choice, config, policy)
        if not resume:
            ranks.once(run.begin)
        ranks.once(run.note, rollouts={"engine": choice.engine, "reason": choice.reason})
        ranks.once(enter, stack, run)
        progress = stack.enter_context(Progress(config.steps, done, console))
        stopped = stack.enter_context(stop_signals(console))
        trainer = Trainer(
            config,
            policy=policy,
            rollouts=rollouts,
            grader=grader,
            order=order,
            heldout=heldout,
            run=run,
            checkpoints=checkpoints,
            progress=progress,
            reference=reference,
            should_stop=lambda: bool(stopped),
            ranks=ranks,
        )
        finished = trainer.train()
    if not finished:
        raise Interrupted(folder)
    return folder


def data_and_grader(config: Config) -> tuple[list[Example], list[Example], Grader]:
    """Training prompts, held-out prompts and who judges the answers to them."""
    train = load_examples(config.data.train)
    heldout = load_examples(config.data.heldout) if config.data.heldout else []
    check_prompts(config.data, train, heldout, at_least=config.grpo.prompts_per_step, key="grpo.prompts_per_step")
    sources = {config.data.train: train} | ({config.data.heldout: heldout} if config.data.heldout else {})
    return train, heldout, grader_for(sources, judge=config.judge, plugin=config.grader)


def check_prompts(
    data: DataConfig, train: Sequence[Example], heldout: Sequence[Example], *, at_least: int, key: str
) -> None:
    """ConfigError, before anything heavy is loaded, for too few prompts and for held-out ones that are trained on."""
    enough(train, at_least, key)
    mine = {conversation(e): e.uid for e in train}
    shared = [e for e in heldout if conversation(e) in mine]
    if shared:
        raise ConfigError(
            f"data.heldout: {len(shared)} of {len(heldout)} prompts are in data.train too, such as {shared[0].uid!r} "
            f"(there: {mine[conversation(shared[0])]!r}); take them out of one of the files. To see how well training "
            "prompts are learnt, run `rise-rl eval --prompts` on them afterwards"
        )


def conversation(example: Example) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], message["content"]) for message in example.messages)


def enter(stack: ExitStack, context: AbstractContextManager[object]) -> None:
    stack.enter_context(context)


def go_back(
    run: RunFolder,
    checkpoints: CheckpointStore,
    policy: PolicyEngine,
    console: Console,
    steps: int,
    updates_per_step: int,
    ranks: Ranks,
) -> int:
    """Policy and run folder both as they were when the last whole checkpoint was saved (or at the very start). Returns
    the steps done. Says what the configuration changes about the run, and whether any of the `steps` is left.
    ConfigError if a step had another number of updates when the checkpoint was saved.
    """
    ranks.once(checkpoints.recover)
    before = ranks.once(updates_made, run)
    found = checkpoints.load_latest(policy)
    step, rest = divmod(policy.step, updates_per_step)
    if rest or (found and before != updates_per_step):
        raise ConfigError(
            f"grpo.mini_batch_prompts: the checkpoint has {policy.step} optimizer updates, {before} a step, but this "
            f"configuration makes {updates_per_step} a step; resume with the mini-batches the run was started with"
        )
    ranks.once(run.truncate_after, step)
    ranks.once(checkpoints.forget_best_after, step)
    console.print(f"resuming {run.path} after step {step}" if found else f"{run.path}: no checkpoint yet")
    for key, (old, new) in ranks.once(run.config_changes).items():
        console.print(f"  changed: {key} from {old} to {new}", markup=False, highlight=False, soft_wrap=True)
    if step >= steps:
        console.print(f"no step left: {step} are done, and the configuration asks for {steps}", highlight=False)
    return step


def updates_made(run: RunFolder) -> int:
    """Optimizer updates a step, by the run's own configuration, whichever command and version wrote it."""
    grpo = run.config().get("grpo", {})
    prompts = grpo.get("prompts_per_step", 1)
    return prompts // (grpo.get("mini_batch_prompts") or prompts)


SAME_REQUEST = 2.0
"""Seconds. A launcher passes Ctrl-C on to processes that the terminal has told already: that is one request."""


@contextmanager
def stop_signals(console: Console) -> Iterator[list[float]]:
    """Ctrl-C or SIGTERM asks the run to save after this step (the list fills); a second one stops at once."""
    received: list[float] = []

    def on_signal(number: int, _: object) -> None:
        now = time.monotonic()
        if not received:
            received.append(now)
            console.print("stopping after this step and saving; once more to stop at once (the last checkpoint stands)")
        elif now - received[0] > SAME_REQUEST:
            raise KeyboardInterrupt

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
