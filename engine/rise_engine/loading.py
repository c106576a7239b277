"""Model and tokenizer from a local folder or a hub id, quietly and with errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from .dropout import without_dropout

# What transformers raises, depending on which file is missing or damaged.
UNREADABLE = (OSError, ValueError, SafetensorError)


def load_model(source: str | Path, *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """A causal language model on the CPU, its dropout turned off. Raises OSError naming `source` if there is none, or
    only part of one.
    """
    with quiet():
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                str(source), dtype=dtype, attn_implementation=attention, output_loading_info=True
            )
        except UNREADABLE as error:
            raise _cannot_load("model", source, error) from error
    if found["missing_keys"]:
        # transformers would make these up at random and go on.
        missing = sorted(found["missing_keys"])
        raise OSError(f"model: {source} lacks {len(missing)} of its weights (first: {missing[0]})")
    without_dropout(model)
    return model


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    with quiet():
        try:
            return AutoTokenizer.from_pretrained(str(source))
        except UNREADABLE as error:
            raise _cannot_load("tokenizer", source, error) from error


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends an answer: the generation config's (Qwen3 has two), else the model's, and the tokenizer's.

    Raises ValueError if nobody names one.
    """
    found: set[int] = set()
    for value in (
        model.generation_config.eos_token_id if model.generation_config else None,
        model.config.eos_token_id,
        tokenizer.eos_token_id,
    ):
        if value is not None:
            found |= set(value) if isinstance(value, list | tuple) else {int(value)}
    if not found:
        raise ValueError("model: neither generation config, config nor tokenizer names a stop token (eos_token_id)")
    return tuple(sorted(found))


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Any valid id does: padding is masked everywhere."""
    return next((int(i) for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def _cannot_load(what: str, source: str | Path, error: Exception) -> OSError:
    if Path(source).exists():
        where = next((f"{path.name} cannot be read: " for path in _damaged(Path(source))), "")
        return OSError(f"{what}: {source} is not a complete transformers folder: {where}{_first_line(error)}")
    return OSError(f"{what}: {source} is neither a local folder nor a hub id that can be reached: {_first_line(error)}")


def _damaged(folder: Path) -> Iterator[Path]:
    """Weights that are cut or no safetensors at all; the error that transformers passes on does not say which."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError):
            yield path


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
