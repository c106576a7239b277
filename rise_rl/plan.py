"""`rise-rl plan`: what a run will hold in memory, and what to change if it does not fit. Nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from rise_engine.memory_advice import Advice, advise, largest_share, vllm_starts
from rise_engine.memory_plan import (
    ROWS,
    VLLM,
    MemoryPlan,
    ModelShape,
    Setting,
    Workload,
    activations,
    full_logits,
    head_workspace,
    plan_memory,
)
from rise_engine.model_shapes import PUBLISHED, file_shape, model_shape
from rise_engine.plan_settings import setting_of
from rise_engine.rollout_memory import vllm_asleep, vllm_needs, vllm_rows

from .config import Config, ConfigError
from .errors import RiseError
from .fetch import resolve_model
from .limits import check_context, check_ranks

GIB = 2**30
RESERVE = 1 * GIB
"""The process itself: code, CUDA context, communication libraries."""
USABLE = 0.95
"""Of the rest: allocators keep some memory in pieces that are too small. An estimate."""


@dataclass(frozen=True)
class RunPlan:
    """device_bytes: memory of one rank's device (of its share of the host where on_cpu)."""

    shape: ModelShape
    work: Workload
    setting: Setting
    device_bytes: int
    memory: MemoryPlan
    advice: list[Advice]

    @property
    def limit(self) -> float:
        return max(0.0, (self.device_bytes - RESERVE) * USABLE)

    @property
    def starts(self) -> bool:
        return vllm_starts(self.shape, self.work, self.setting, self.device_bytes)

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.limit and self.starts


def plan_run(
    config: Config, *, ranks: int = 1, device_gib: float | None = None, model_config: Path | None = None
) -> RunPlan:
    """device_gib: plan for a GPU of that size; None: for this machine's GPU, or its host memory shared by the ranks.

    Raises ConfigError for what `train` would refuse too, and where the model's shape cannot be had (or FetchError).
    """
    on_cpu = device_gib is None and not torch.cuda.is_available()
    device_bytes = round(device_gib * GIB) if device_gib is not None else _memory_here(ranks)
    # `auto` is vLLM where it is installed: on a GPU machine to come it is taken to be.
    has_vllm = not on_cpu or find_spec("vllm") is not None
    check_ranks(config, ranks, has_vllm=has_vllm)
    shape = _shape(config, model_config)
    check_context(config, shape.context, guidance=config.hints)
    work = workload(config, shape, ranks)
    with_vllm = config.rollout.engine == "vllm" or (config.rollout.engine == "auto" and has_vllm)
    setting = setting_of(
        config.engine,
        ranks=ranks,
        on_cpu=on_cpu,
        reference=config.grpo.kl_coef > 0,
        vllm=config.rollout.vllm if with_vllm else None,
    )
    memory = plan_memory(shape, work, setting, device_bytes)
    limit = RunPlan(shape, work, setting, device_bytes, memory, []).limit
    return RunPlan(shape, work, setting, device_bytes, memory, advise(shape, work, setting, limit, device_bytes))


def workload(config: Config, shape: ModelShape, ranks: int) -> Workload:
    """The longest prompt and answer that the configuration allows, in every place of a group."""
    grpo, guidance = config.grpo, config.guidance
    group = grpo.group_size + (guidance.rollouts if guidance.enabled else 0)
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    packed = config.engine.attention != "eager"
    prompts = -(-(grpo.prompts_per_step // grpo.updates_per_step) // ranks)
    tokens = prompts * (prompt + group * response if packed else group * (prompt + response))
    return Workload(
        prompt=prompt,
        response=response,
        group=group,
        micro_batch=config.engine.micro_batch_tokens,
        packed=packed,
        several=tokens > config.engine.micro_batch_tokens,
        rows=config.rollout.max_rows,
        hint=config.hint_tokens,
    )


def _shape(config: Config, model_config: Path | None) -> ModelShape:
    if model_config is None and config.model in PUBLISHED:
        return PUBLISHED[config.model]
    try:
        return model_shape(resolve_model(config.model)) if model_config is None else file_shape(model_config)
    except RiseError:
        raise
    except ValueError as error:
        raise ConfigError(f"{'model' if model_config is None else '--model-config'}: {error}") from error


def _memory_here(ranks: int) -> int:
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    import psutil

    return psutil.virtual_memory().total // ranks


def show(plan: RunPlan, console: Console) -> None:
    memory, work, setting = plan.memory, plan.work, plan.setting
    where = "of host memory a rank" if setting.on_cpu else "of GPU memory"
    kind = {2: "bfloat16", 4: "float32"}[setting.dtype_bytes]
    console.print(
        f"{plan.shape.parameters / 1e9:.2f} billion parameters, {kind}, ZeRO {setting.stage}, {setting.ranks} rank(s), "
        f"{_gib(plan.device_bytes)} GiB {where}; a micro-batch of at most {work.tokens} tokens, {work.scored} of them "
        "scored",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("GiB a rank", *(p for p in memory.phases), box=SIMPLE_HEAD, padding=0)
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for row in ROWS:
        amounts = [memory.phases[p].get(row, 0.0) for p in memory.phases]
        if any(amounts):
            table.add_row(row, *(_gib(a) if a else "" for a in amounts))
    table.add_section()
    table.add_row(
        "total",
        *[
            f"[bold]{_gib(memory.total(p))}[/bold]" if p == memory.peak_phase else _gib(memory.total(p))
            for p in memory.phases
        ],
    )
    console.print(table)
    for line in notes(plan):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def notes(plan: RunPlan) -> list[str]:
    """What the table does not say, the verdict, and the advice."""
    shape, work, setting, memory = plan.shape, plan.work, plan.setting, plan.memory
    packed, padded = work.prompt + work.group * work.response, work.group * (work.prompt + work.response)
    other = replace(setting, checkpointing=not setting.checkpointing)
    state = ("with", "without") if setting.checkpointing else ("without", "with")
    lines = [
        f"head: {_gib(head_workspace(shape, work, setting))} GiB of workspace; float32 logits of the same "
        f"{work.scored} rows and their gradient would take {_gib(full_logits(shape, work))} GiB",
        f"activations {state[0]} checkpointing {_gib(activations(shape, work, setting)[1])} GiB, {state[1]} "
        f"{_gib(activations(shape, work, other)[1])} GiB",
        f"a prompt's group of {work.group} at full length: {packed} tokens packed, {padded} padded "
        f"({'packed' if work.packed else 'padded'} here)",
    ]
    if VLLM in memory.phases["rollout"] and not setting.on_cpu:
        lines += _vllm(plan)
    if memory.host:
        held = ", ".join(f"{what} {_gib(amount)}" for what, amount in memory.host.items())
        lines.append(f"host memory a rank, in GiB: {held}")
    usable = f"{_gib(plan.limit)} GiB usable (all but {_gib(RESERVE)} GiB for the process and {1 - USABLE:.0%})"
    found = f"peak {_gib(memory.peak)} GiB ({memory.peak_phase}), {usable}"
    if plan.fits:
        return [*lines, f"fits: {found}"]
    lines.append(f"does NOT fit: {found}" if plan.starts else f"vLLM will NOT start; {found}")
    for change in plan.advice:
        effect = f"saves {_gib(change.saves)} GiB, " if change.saves > 0 else ""
        lines.append(f"  {change.key}={change.value}: {effect}peak {_gib(change.peak)} GiB")
    last = plan.advice[-1].peak if plan.advice else memory.peak
    if last > plan.limit:
        more = "a rank with more memory" if setting.stage < 3 and setting.ranks == 1 else "more ranks or more memory"
        lines.append(f"  not enough: {_gib(last)} GiB is left after these; take {more}, or shorter lengths")
    return lines


def _vllm(plan: RunPlan) -> list[str]:
    """What vLLM's share of a GPU is good for."""
    shape, work, setting, device = plan.shape, plan.work, plan.setting, plan.device_bytes
    weights = setting.dtype_bytes * shape.parameters / setting.vllm_ranks
    tokens = work.prompt + work.hint + work.response
    rows = vllm_rows(shape, work, setting, device)
    if not plan.starts:
        need = vllm_needs(shape, work, setting, device)
        room = f"no room for one answer of full length ({tokens} tokens), which takes {_gib(need)} GiB in all"
    else:
        room = f"room for {min(rows, work.rows)} of {work.rows} answers of full length ({tokens} tokens) at a time"
    lines = [
        f"vLLM: rollout.vllm.memory_fraction {setting.vllm} is {_gib((setting.vllm or 0) * device)} GiB; its weights "
        f"take {_gib(weights)}; {room}; about {_gib(vllm_asleep(setting))} stay while it sleeps"
    ]
    most = min(0.9, round(largest_share(shape, work, setting, plan.limit, device), 2))
    if plan.fits and rows < work.rows and most > (setting.vllm or 0):
        more = vllm_rows(shape, work, replace(setting, vllm=most), device)
        lines.append(f"  rollout.vllm.memory_fraction={most:g} would fit too, with room for {min(more, work.rows)}")
    return lines


def _gib(amount: float) -> str:
    return f"{amount / GIB:.2f}"
