"""The README's results: the quickstart with and without guidance, on the held-out prompts without guidance.

    python bench/quickstart.py            # runs what is not finished yet (about half an hour on two cores), then prints
    python bench/quickstart.py --figures docs/images

One seed each: an illustration, not a study. Runs live in runs/ and are resumed if they were stopped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from rise_rl.config import load_config
from rise_rl.report import write_figures
from rise_rl.report.heatmap import heat_map
from rise_rl.run_folder import RunFolder

RECIPE = "recipes/quickstart.yaml"
VARIANTS = {
    "RISE-RL": ("quickstart", []),
    "Rubric-RL (guidance off)": ("quickstart-rubric-rl", ["guidance.enabled=false"]),
}


def finished_run(name: str, overrides: list[str]) -> RunFolder:
    overrides = [f"name={name}", *overrides]
    config = load_config(RECIPE, overrides)
    run = RunFolder(Path(config.output) / name)
    if not run.metrics() or run.metrics()[-1]["step"] < config.steps:
        resume = ["--resume"] if (run.path / "config.yaml").exists() else []
        subprocess.run([sys.executable, "-m", "rise_rl.cli", "train", RECIPE, *overrides, *resume], check=True)
    return run


def row(label: str, record: dict, start: dict, minutes: float | None) -> str:
    heat = heat_map([start, record])
    assert heat is not None
    woken, never = heat.woken(start["step"], record["step"])
    time = "-" if minutes is None else f"{minutes:.0f} min"
    return f"| {label} | {record['reward/mean']:.3f} | {woken} of {never} | {record['length/mean']:.0f} | {time} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, help="also write curves.png and heatmap.png of the RISE-RL run here")
    arguments = parser.parse_args()
    runs = {label: finished_run(*variant) for label, variant in VARIANTS.items()}
    start = runs["RISE-RL"].evals()[0]
    print("| | held-out reward | criteria never met at the start, now met | tokens | time |\n|---|---|---|---|---|")
    print(row("untrained", start, start, None))
    for label, run in runs.items():
        print(row(label, run.evals()[-1], start, sum(m["time/step"] for m in run.metrics()) / 60))
    if arguments.figures:
        for path in write_figures(runs["RISE-RL"].path, arguments.figures):
            print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
