"""A small replication on the CPU: RISE-RL, Rubric-RL, RuscaRL and two ablations at equal steps, prompts and seeds.

    nice python bench/replication.py                    # hours on two cores; stop it and start it again as you like
    python bench/replication.py --page-only             # the table from what is finished so far

Runs live in runs/ and are resumed from their checkpoints; a finished one is not run again. All methods of one seed come
before the next seed, so that what is there after a stop compares. Writes docs/replication.md.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rise_rl.config import Config, load_config
from rise_rl.report.heatmap import heat_map
from rise_rl.run_folder import RunFolder

PAGE = Path(__file__).parents[1] / "docs" / "replication.md"
ENTROPY_STEPS = 5
TEMPLATE = """# A small replication

Written by `{command}`, which can be stopped and started again.
{model}, {steps} steps of {prompts} prompts with {group} natural answers each, by `{recipe}`.
Machine: {cpu}, {cores} cores, {gpus}; other work may have shared it, so minutes are no benchmark.
Revision of the first run: {revision}.

{missing}Held-out: a fixed cohort of prompts that are never trained on, {answers} answers each, without any criteria in
the prompt and from the whole distribution. "Never met" counts criteria that every answer of the untrained model to
every prompt of a topic misses. +- is the standard deviation over seeds; the answers of an evaluation add sampling noise
of their own. Entropy: of the policy over the natural tokens trained on, mean of the last steps.

{summary}

{paired}

Methods of one seed have no spread: how they rank says nothing yet. Equal are prompts, seeds and steps, not sampled
tokens: the guided branch samples more (see the column), and RuscaRL makes two updates a step.

## Every run

{every_run}
"""


@dataclass(frozen=True)
class Method:
    """overrides: of the recipe. all_seeds: else the first seed alone."""

    label: str
    overrides: tuple[str, ...]
    all_seeds: bool = False


def methods(recipe: Config) -> dict[str, Method]:
    """In the order of the table. Guidance ends after 60 % of the steps wherever it ends."""
    half = max(1, recipe.grpo.prompts_per_step // 2)
    ruscarl = (
        *("guidance.enabled=false", "scaffold.enabled=true", "scaffold.budget_tokens=128"),
        *(f"grpo.mini_batch_prompts={half}", "grpo.kl_coef=0.001", "engine.warmup_steps=0"),
        *("rollout.temperature=0.7", "rollout.top_p=0.8", "rollout.top_k=20", "rollout.subset_sampling=true"),
    )
    return {
        "rise": Method("RISE-RL", (), all_seeds=True),
        "rubric": Method("Rubric-RL", ("guidance.enabled=false",), all_seeds=True),
        "ruscarl": Method("RuscaRL", ruscarl),
        "persistent": Method("RISE-RL, persistent guidance", ("guidance.remove_at=never",)),
        "coupled": Method("RISE-RL, coupled", ("guidance.coupled=true",)),
    }


@dataclass(frozen=True)
class Planned:
    key: str
    method: Method
    seed: int
    overrides: tuple[str, ...]

    def config(self, recipe: str) -> Config:
        return load_config(recipe, self.overrides)


def planned(arguments: argparse.Namespace) -> list[Planned]:
    """Every (method, seed), seed by seed."""
    table = methods(load_config(arguments.recipe, arguments.set))
    unknown = sorted(set(arguments.methods or []) - set(table))
    if unknown:
        sys.exit(f"--methods: unknown {', '.join(unknown)}; expected some of {', '.join(table)}")
    common = [*arguments.set, f"steps={arguments.steps}", f"guidance.remove_at={round(0.6 * arguments.steps)}"]
    plans = []
    for seed in arguments.seeds:
        for key in arguments.methods or table:
            method = table[key]
            if method.all_seeds or seed == arguments.seeds[0]:
                name = f"replication-{key}-{arguments.steps}-s{seed}"
                overrides = (*common, f"seed={seed}", *method.overrides, f"name={name}")
                plans.append(Planned(key, method, seed, overrides))
    return plans


def finished(run: RunFolder, config: Config) -> bool:
    """Whether the last step and its evaluation are logged; an untouched folder is a run that has not begun."""
    evals = run.evals()
    return bool(evals) and evals[-1]["step"] >= config.steps and len(run.metrics()) >= config.steps


def folder_of(config: Config) -> RunFolder:
    return RunFolder(Path(config.output) / config.name)


def train(plan: Planned, recipe: str) -> int:
    """Runs or resumes; the exit code of `rise-rl train`."""
    run = folder_of(plan.config(recipe))
    resume = ["--resume"] if (run.path / "config.yaml").exists() else []
    return subprocess.run([sys.executable, "-m", "rise_rl.cli", "train", recipe, *plan.overrides, *resume]).returncode


# --- the page --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """start, end: held-out reward. woken, never: criteria never met at the start, and those of them met at the end."""

    plan: Planned
    start: float
    end: float
    entropy: float
    woken: int
    never: int
    tokens: float
    sampled: int
    minutes: float


def outcome(plan: Planned, run: RunFolder) -> Outcome:
    metrics, evals = run.metrics(), run.evals()
    first, last = evals[0], evals[-1]
    heat = heat_map([first, last])
    if heat is None:
        raise ValueError(f"{run.path}: its evaluations have no criteria")
    woken, never = heat.woken(first["step"], last["step"])
    return Outcome(
        plan=plan,
        start=first["reward/mean"],
        end=last["reward/mean"],
        entropy=statistics.fmean(m["entropy"] for m in metrics[-ENTROPY_STEPS:] if m["entropy"] is not None),
        woken=woken,
        never=never,
        tokens=last["length/mean"],
        sampled=sum(m["tokens/generated"] for m in metrics),
        minutes=sum(m["time/step"] for m in metrics) / 60,
    )


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Mean and, of two or more, the standard deviation over seeds (ddof 1)."""
    mean = format(statistics.fmean(values), form)
    return mean if len(values) < 2 else f"{mean} +- {format(statistics.stdev(values), form)}"


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    lines = [
        "| method | seeds | held-out reward, start | end | never met at the start, met at the end | entropy | tokens | "
        "tokens sampled | minutes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for label in dict.fromkeys(o.plan.method.label for o in outcomes):
        some = [o for o in outcomes if o.plan.method.label == label]
        woken = f"{spread([o.woken for o in some], '.1f')} of {statistics.fmean(o.never for o in some):.1f}"
        columns = [
            *(label, str(len(some)), spread([o.start for o in some]), spread([o.end for o in some]), woken),
            *(spread([o.entropy for o in some], ".2f"), spread([o.tokens for o in some], ".0f")),
            *(f"{statistics.fmean(o.sampled for o in some):,.0f}", f"{statistics.fmean(o.minutes for o in some):.0f}"),
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return lines


def every_run(outcomes: Sequence[Outcome]) -> list[str]:
    lines = ["| method | seed | start | end | met of never met | entropy |", "|---|---|---|---|---|---|"]
    for o in outcomes:
        lines.append(
            f"| {o.plan.method.label} | {o.plan.seed} | {o.start:.3f} | {o.end:.3f} | {o.woken} of {o.never} | "
            f"{o.entropy:.2f} |"
        )
    return lines


def paired(outcomes: Sequence[Outcome]) -> str:
    """RISE-RL against Rubric-RL, seed by seed: the two see the same prompts in the same order."""
    by_seed = {(o.plan.key, o.plan.seed): o for o in outcomes}
    seeds = sorted(seed for key, seed in by_seed if key == "rise" and ("rubric", seed) in by_seed)
    if not seeds:
        return "RISE-RL and Rubric-RL have no seed in common yet."
    gaps = [by_seed["rise", s].end - by_seed["rubric", s].end for s in seeds]
    each = ", ".join(f"{gap:+.3f}" for gap in gaps)
    return (
        f"RISE-RL minus Rubric-RL in held-out reward at the end, seed by seed ({', '.join(map(str, seeds))}): {each}; "
        f"mean {statistics.fmean(gaps):+.3f}.\nEven if all {len(seeds)} agreed in sign, a two-sided sign test would "
        f"give p = {2.0 ** (1 - len(seeds)):g}: a direction at most."
    )


def page(outcomes: Sequence[Outcome], missing: int, arguments: argparse.Namespace, manifest: dict[str, Any]) -> str:
    config = outcomes[0].plan.config(arguments.recipe)
    hardware, code = manifest["hardware"], manifest["code"] or {}
    return TEMPLATE.format(
        command=shlex.join(["python", "bench/replication.py", *(a for a in sys.argv[1:] if a != "--page-only")]),
        model=config.model,
        steps=config.steps,
        prompts=config.grpo.prompts_per_step,
        group=config.grpo.group_size,
        recipe=arguments.recipe,
        cpu=hardware["cpu"],
        cores=hardware["cores"],
        gpus=", ".join(hardware["gpus"]) or "no GPU",
        revision=code.get("revision", "unknown"),
        missing=f"{missing} of the planned runs are not finished and not counted.\n\n" if missing else "",
        answers=config.evaluation.samples,
        summary="\n".join(summary(outcomes)),
        paired=paired(outcomes),
        every_run="\n".join(every_run(outcomes)),
    )


def write_page(plans: Sequence[Planned], arguments: argparse.Namespace) -> None:
    runs = [(plan, folder_of(plan.config(arguments.recipe))) for plan in plans]
    done = [(p, run) for p, run in runs if run.path.exists() and finished(run, p.config(arguments.recipe))]
    if not done:
        print("no run is finished yet", file=sys.stderr)
        return
    order = list(methods(load_config(arguments.recipe, arguments.set)))
    outcomes = sorted((outcome(p, run) for p, run in done), key=lambda o: (order.index(o.plan.key), o.plan.seed))
    text = page(outcomes, len(plans) - len(done), arguments, done[0][1].manifest())
    arguments.page.write_text(text, encoding="utf-8")
    print(f"{arguments.page}: {len(done)} of {len(plans)} runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", help="some of rise, rubric, ruscarl, persistent, coupled")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of every run")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the table goes")
    parser.add_argument("--page-only", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    plans = planned(arguments)
    for plan in [] if arguments.page_only else plans:
        config = plan.config(arguments.recipe)
        if finished(folder_of(config), config):
            continue
        code = train(plan, arguments.recipe)
        if code:
            write_page(plans, arguments)
            sys.exit(f"{config.name}: stopped (exit code {code}); start the same command again to go on")
        write_page(plans, arguments)
    write_page(plans, arguments)


if __name__ == "__main__":
    main()
