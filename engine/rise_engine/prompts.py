"""From a conversation to prompt ids: one function for rollout, training and guided re-evaluation alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Token ids of the conversation up to where the assistant's answer begins.

    `chat_template_kwargs` go to the template (Qwen3's `enable_thinking`, for one). Raises ValueError if the tokenizer
    has no chat template, or if the conversation is empty or renders to no tokens.
    """
    if not messages:
        raise ValueError("messages: expected at least one message, found none")
    if not tokenizer.chat_template:
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path!r} has no chat template: use an instruction-tuned model, or put a "
            "`chat_template.jinja` in the model folder"
        )
    try:
        rendered = tokenizer.apply_chat_template(
            [dict(m) for m in messages],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            tokenizer_kwargs={"verbose": False},  # who asks for the ids says what is too long, and what to do about it
            **dict(chat_template_kwargs or {}),
        )
    except TemplateError as error:  # a template that knows no system role, say
        raise ValueError(f"messages: the chat template refuses this conversation: {error}") from error
    ids = tuple(int(i) for i in rendered["input_ids"])
    if not ids:
        raise ValueError("messages: the chat template rendered no tokens at all")
    return ids
