"""The shape of a model before its weights are there: from a folder, a file, a published table or the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .memory_plan import ModelShape


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> ModelShape:
    return ModelShape(
        vocabulary=151_936,
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        tied=tied,
        qk_norm=True,
        qkv_bias=False,
        context=40_960,
    )


PUBLISHED = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, tied=False),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, tied=False),
}
"""Shapes of the models' public config.json files, so that a plan needs no network (Qwen3 report, arXiv 2505.09388)."""


def model_shape(source: str | Path) -> ModelShape:
    """source: a config.json, a transformers folder, a published name or a hub id.

    Raises ValueError for a model that cannot be planned, OSError where there is no configuration to be had.
    """
    path = Path(source).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return file_shape(path / "config.json" if path.is_dir() else path)
    if str(source) in PUBLISHED:
        return PUBLISHED[str(source)]
    return _shape(_hub_config(str(source)), str(source))


def file_shape(file: Path) -> ModelShape:
    """Of a config.json, whatever its name. Raises ValueError, also where it cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{file}: not a JSON file: {error}") from error
    return _shape(found, str(file))


def _shape(config: Any, where: str) -> ModelShape:
    if not isinstance(config, dict):
        raise ValueError(f"{where}: expected an object of configuration keys, found {type(config).__name__}")
    try:
        return ModelShape.from_config(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _hub_config(name: str) -> dict[str, Any]:
    from transformers import AutoConfig

    from .loading import UNREADABLE, quiet

    with quiet():
        try:
            return AutoConfig.from_pretrained(name).to_dict()
        except UNREADABLE as error:
            raise OSError(
                f"model: no configuration of {name!r} here or on the hub; give its config.json with --model-config "
                f"(published shapes that need none: {', '.join(PUBLISHED)})"
            ) from error
