"""What a run leaves behind, written so that a kill at any moment loses nothing that a resume needs.

    config.yaml       resolved configuration
    manifest.json     revision, versions, hardware, data hash, command; one entry per resume
    metrics.jsonl     a line per step, names of `rise_rl.metrics.METRICS`
    evals.jsonl       a line per held-out evaluation, names of EVAL_METRICS
    rollouts/         step_000012.jsonl: the answers of step 12 with their verdicts
    tensorboard/      events
    checkpoints/      the engine's
    report.html

Lines are flushed and synced one by one; whole files are written aside and renamed. NaN and infinities become null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from .config import RunConfig, dump_config
from .errors import RiseError
from .files import FileError, read_lines, write_aside
from .manifest import code_revision, data_source, make_manifest, now, versions
from .metrics import EVAL_METRICS, METRICS, Metric, check_names
from .trackers import Tracker, check_trackers, first_step_again, numbers, open_trackers

MENDABLE = ". What was saved before stands: mend it and go on with --resume"


class RunFolderError(RiseError):
    """The run folder cannot be used; the message says why and what to do."""


class RunFolder:
    """`RunFolder(path)` reads a run; `new` and `resume` open one for writing (as a context manager: with trackers).

    A multi-process run has one writer, its first process.
    """

    def __init__(self, path: str | Path, config: RunConfig | None = None) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._config = config
        self._trackers: list[Tracker] = []
        self._last_step: dict[str, int] = {}
        self._resumed_after: int | None = None
        self._sent_until = self._evaluated_until = -1
        self._config_due = False

    # --- opening ---------------------------------------------------------------------------------------------------

    @classmethod
    def new(cls, path: str | Path, config: RunConfig) -> RunFolder:
        """A run that has not begun: the folder must be empty or not there yet, RunFolderError otherwise. Nothing is
        written before `begin`, so that what goes wrong while a model loads leaves no run behind.
        """
        check_trackers(config.trackers)
        run = cls(path, config)
        found = sorted(p.name for p in run.path.iterdir() if p.suffix != ".tmp") if run.path.is_dir() else []
        if found or run.path.is_file():
            raise RunFolderError(
                f"{run.path}: already there ({', '.join(found[:4]) or 'a file'}{', ...' if len(found) > 4 else ''}); "
                "--resume goes on with that run, name=... starts another one, or remove it"
            )
        return run

    def begin(self) -> None:
        config = self._writable()
        self.path.mkdir(parents=True, exist_ok=True)
        save(self.path / "config.yaml", dump_config(config))
        self._write_manifest(make_manifest(config) | {"resumes": []})

    @classmethod
    def resume(cls, path: str | Path, config: RunConfig) -> RunFolder:
        """An existing run, to go on with; nothing is written before `truncate_after`. Raises RunFolderError if there is
        no run, or other data. The configuration may differ from the run's own: the manifest then says where, and
        config.yaml becomes the new one with the first line that is logged under it.
        """
        check_trackers(config.trackers)
        run = cls(path, config)
        if not (run.path / "config.yaml").is_file():
            raise RunFolderError(f"{run.path}: no run to resume (no config.yaml there); start it without --resume")
        run._check_same_data(config)
        return run

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """One process at a time; the lock goes with the process, however it ends. RunFolderError if it is taken."""
        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout as error:
            raise RunFolderError(f"{self.path}: another process is writing this run") from error
        except OSError as error:
            raise RunFolderError(f"output: no run can be written in {self.path.parent} ({error.strerror})") from error
        try:
            yield
        finally:
            lock.release()

    def _check_same_data(self, config: RunConfig) -> None:
        """The batch of a step is a function of the data, and the best model is the best on one held-out cohort."""
        try:
            before = self.manifest()["data"]
        except RunFolderError:  # killed between config.yaml and manifest.json
            return
        for key in ("train", "heldout"):
            source = getattr(config.data, key)
            then, here = before.get(key), data_source(source)
            # A file is its content, wherever it lies; a hub id is its name.
            same = "sha256" if then and then["sha256"] else "source"
            if then and here and then[same] != here[same]:
                raise RunFolderError(
                    f"{self.path}: data.{key}: {source} is not the data the run began with ({then['source']}); restore "
                    "it, or start another run"
                )

    def truncate_after(self, step: int) -> None:
        """Drops what was logged after the checkpoint of step `step` that the run resumes from, whole or half-written.

        step 0: no checkpoint was saved, so the run starts again, first evaluation included.
        Raises RunFolderError if the log ends before the checkpoint, as then the two do not belong together.
        """
        last = max((row["step"] for row in self.metrics()), default=0)
        if last < step:
            raise RunFolderError(
                f"{self.path}: the checkpoint is of step {step} but metrics.jsonl ends at step {last}; they are not of "
                "one run, or metrics.jsonl was cut"
            )
        self._record_resume(step, last)
        first_again = first_step_again(step)
        for file in ("metrics.jsonl", "evals.jsonl"):
            kept = [row for row in self._lines(file) if row["step"] < first_again]
            save(self.path / file, "".join(to_line(row) for row in kept))
        for rollouts in (self.path / "rollouts").glob("step_*"):
            if rollouts.suffix != ".jsonl" or int(rollouts.stem.removeprefix("step_")) >= first_again:
                rollouts.unlink()
        self._last_step.clear()

    def _record_resume(self, step: int, last: int) -> None:
        config = self._writable()
        try:
            manifest = self.manifest()
        except RunFolderError:  # killed between config.yaml and manifest.json
            manifest = make_manifest(config) | {"resumes": []}
        manifest["data"]["heldout"] = manifest["data"].get("heldout") or data_source(config.data.heldout)
        entry = {
            "time": now(),
            "after_step": step,
            "logged_until": last,
            "evaluated_until": max((row["step"] for row in self.evals()), default=-1),
            "code": code_revision(),
            "versions": versions(),
        }
        manifest["resumes"].append(entry | {"config_changes": self.config_changes()})
        self._resumed_after = step
        self._sent_until = max(r["logged_until"] for r in manifest["resumes"]) or -1
        self._evaluated_until = max(r.get("evaluated_until", r["logged_until"]) for r in manifest["resumes"])
        self._write_manifest(manifest)
        self._config_due = True

    def config_changes(self) -> dict[str, Any]:
        """{dotted key: [before, after]} of a resumed run: its own configuration, and the one it goes on with."""
        return changed_keys(self.config(), plain(self._writable()))

    def __enter__(self) -> RunFolder:
        config = self._writable()
        started = "".join(c for c in self.manifest()["started"] if c.isdigit())
        self._trackers = open_trackers(
            config.trackers,
            self.path,
            name=config.name,
            run_id=f"{config.name}-{started[:14]}",
            config=plain(config),
            resumed_after=self._resumed_after,
            sent_until=self._sent_until,
            evaluated_until=self._evaluated_until,
        )
        return self

    def __exit__(self, *_: object) -> None:
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []

    # --- writing ---------------------------------------------------------------------------------------------------

    def log_metrics(self, values: Mapping[str, Any]) -> None:
        """One step's line; names not given are null. Raises ValueError for an unknown name or a step logged already."""
        self._log("metrics.jsonl", values, METRICS, prefix="")

    def log_eval(self, values: Mapping[str, Any]) -> None:
        """One held-out evaluation's line, under the same rules."""
        self._log("evals.jsonl", values, EVAL_METRICS, prefix="eval/")

    def write_rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        self._writable()
        folder = self.path / "rollouts"
        folder.mkdir(exist_ok=True)
        save(folder / f"step_{step:06d}.jsonl", "".join(to_line(r) for r in records))

    def _log(self, file: str, values: Mapping[str, Any], known: Mapping[str, Metric], prefix: str) -> None:
        self._writable()
        check_names(values, known)
        step, path = values["step"], self.path / file
        if file not in self._last_step:
            self._last_step[file] = max((row["step"] for row in self._lines(file)), default=-1)
        if step <= self._last_step[file]:
            raise ValueError(f"{file}: step {step} after step {self._last_step[file]}; a step is logged once")
        row = finite({name: values.get(name) for name in known})
        if self._config_due:
            save(self.path / "config.yaml", dump_config(self._writable()))
            self._config_due = False
        append_line(path, to_line(row))
        self._last_step[file] = step
        for tracker in self._trackers:
            tracker.log({f"{prefix}{name}": v for name, v in numbers(row).items()}, step)

    def _writable(self) -> RunConfig:
        if self._config is None:
            raise ValueError(f"{self.path}: opened for reading; use RunFolder.new or RunFolder.resume to write")
        return self._config

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        save(self.path / "manifest.json", json.dumps(manifest, indent=2) + "\n")

    # --- reading ---------------------------------------------------------------------------------------------------

    def metrics(self) -> list[dict[str, Any]]:
        return self._lines("metrics.jsonl")

    def evals(self) -> list[dict[str, Any]]:
        return self._lines("evals.jsonl")

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """The answers of a step; [] if it left none."""
        return self._lines(f"rollouts/step_{step:06d}.jsonl")

    def rollout_steps(self) -> list[int]:
        return sorted(int(p.stem.removeprefix("step_")) for p in (self.path / "rollouts").glob("step_*.jsonl"))

    def config(self) -> dict[str, Any]:
        """config.yaml as plain values, readable whatever version wrote it."""
        return self._parsed("config.yaml", yaml.safe_load, yaml.YAMLError)

    def note(self, **facts: Any) -> None:
        """Adds to the manifest what was found out after the run had begun."""
        self._write_manifest(self.manifest() | facts)

    def manifest(self) -> dict[str, Any]:
        return self._parsed("manifest.json", json.loads, json.JSONDecodeError)

    def _lines(self, file: str) -> list[dict[str, Any]]:
        try:
            return read_lines(self.path / file)
        except FileError as e:
            raise RunFolderError(str(e)) from e

    def _parsed(self, file: str, parse: Any, error: type[Exception]) -> dict[str, Any]:
        path = self.path / file
        if not path.is_file():
            raise RunFolderError(f"{self.path}: not a run folder, it has no {file}")
        try:
            values = parse(path.read_text(encoding="utf-8"))
        except (error, UnicodeDecodeError) as e:
            raise RunFolderError(f"{path}: not readable: {e}") from e
        if not isinstance(values, dict):
            raise RunFolderError(f"{path}: expected a mapping, found {type(values).__name__}")
        return values


def to_line(row: Mapping[str, Any]) -> str:
    return json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """The same value with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(v) for v in value]
    return value


def append_line(path: Path, line: str) -> None:
    """Appended and on the disk when this returns."""
    try:
        with path.open("ab") as f:
            f.write(line.encode())
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise RunFolderError(f"{path}: cannot be written ({e.strerror}){MENDABLE}") from e


def save(path: Path, text: str) -> None:
    try:
        write_aside(path, text)
    except FileError as e:
        raise RunFolderError(f"{e}{MENDABLE}") from e


def plain(config: RunConfig) -> dict[str, Any]:
    """The configuration as `RunFolder.config` reads it back."""
    return yaml.safe_load(dump_config(config))


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted key: [before, after]} for every leaf that differs."""
    changed: dict[str, Any] = {}
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changed |= changed_keys(old, new, f"{prefix}{key}.")
        elif old != new:
            changed[f"{prefix}{key}"] = [old, new]
    return dict(sorted(changed.items()))
