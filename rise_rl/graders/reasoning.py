"""What a response says to its reader: without the model's reasoning. Rule checks and LLM judge grade the same text."""

from __future__ import annotations

import re

_BLOCK = re.compile(r"<(think|thinking|reasoning)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_HEAD = re.compile(r"\A.*</(?:think|thinking|reasoning)>", re.DOTALL | re.IGNORECASE)


def without_reasoning(text: str) -> str:
    """The text without reasoning blocks, and white space around it removed; as it stands if there is no block.

    An unclosed block reaches to the end; a closing tag alone ends a block that the prompt had opened. Each removal
    leaves a space, so that what stood around it cannot join into a new block or token.
    """
    answer = _HEAD.sub(" ", _BLOCK.sub(" ", text))
    return text if answer == text else answer.strip()
