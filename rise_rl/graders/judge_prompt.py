"""What the judge is asked: templates, cleaned texts, and the schema of its answer.

Every text that comes from a data set or a policy is data. Before it enters the prompt, reasoning blocks and special
tokens are removed and the template's own tags are made harmless; jinja2 then fills all places at once, so that a text
which looks like a placeholder is never looked at again.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from ..rubric import Criterion
from .bands import HIGHEST, LOWEST, bands
from .base import Message
from .errors import GraderError
from .reasoning import without_reasoning

_SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,80}\|>|<｜[^｜<>\n]{1,80}｜>"  # ChatML, Llama 3, harmony; DeepSeek
    r"|</?s>|<(?:bos|eos|pad|unk)>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>",
    re.IGNORECASE,
)
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON may carry a half of a pair; UTF-8 cannot
_TAG = re.compile(r"</?([A-Za-z_][\w-]*)[^<>]*>")


def visible(text: str) -> str:
    """The text without reasoning blocks and special tokens."""
    return without_special_tokens(without_reasoning(text))


def without_special_tokens(text: str) -> str:
    """Each removal leaves a space, so that what stood around it cannot join into a new token."""
    return _SPECIAL.sub(" ", text).strip()


class JudgePrompt:
    """The chat messages that put criteria to a judge. `fingerprint`: a hash of the template's text."""

    def __init__(self, mode: str, path: Path | None = None) -> None:
        """path: a template of one's own with blocks `system` and `user`. Raises GraderError if it cannot be used."""
        self.origin = str(path) if path else f"templates/{mode}.j2"
        try:
            source = (path or resources.files(__package__).joinpath(self.origin)).read_text(encoding="utf-8")
        except OSError as error:
            raise GraderError(f"judge.template: cannot read {self.origin}: {error}") from error
        self.fingerprint = hashlib.sha256(source.encode()).hexdigest()
        environment = SandboxedEnvironment(undefined=jinja2.StrictUndefined, autoescape=False)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise GraderError(f"judge.template: {self.origin}: {error}") from error
        if missing := {"system", "user"} - set(self._template.blocks):
            raise GraderError(f"judge.template: {self.origin}: block {' and '.join(sorted(missing))} is missing")
        tags = sorted({name.lower() for name in _TAG.findall(source)})
        self._own_tag = re.compile(
            rf"<(?=\s{{0,8}}/?\s{{0,8}}(?:{'|'.join(map(re.escape, tags))})\b)" if tags else r"(?!)", re.I
        )
        self._check()

    def field(self, text: str, *, written_by_model: bool = True) -> str:
        """The text as it may stand between the template's tags. Only a model's own text has reasoning to hide."""
        text = visible(text) if written_by_model else without_special_tokens(text)
        return self._own_tag.sub("&lt;", _SURROGATE.sub("\ufffd", text))

    def conversation(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        return [
            {
                "role": re.sub(r"\W", "", m["role"]),
                "content": self.field(m["content"], written_by_model=m["role"] == "assistant"),
            }
            for m in messages
        ]

    def messages(
        self,
        conversation: Sequence[Mapping[str, str]],
        response: str,
        criteria: Sequence[Criterion],
        *,
        scored: bool,
        again: bool = False,
    ) -> list[dict[str, str]]:
        """conversation, response: as `conversation` and `field` return them. again: the first answer was no use."""
        listed = [
            {
                "id": f"c{number}",
                "text": self.field(criterion.text, written_by_model=False),
                "bands": {
                    band: self.field(text, written_by_model=False) for band, text in (bands(criterion) or {}).items()
                },
            }
            for number, criterion in enumerate(criteria, start=1)
        ]
        values = {
            "conversation": conversation,
            "response": response,
            "criteria": listed,
            "scored": scored,
            "again": again,
        }
        context = self._template.new_context(values)
        try:
            return [
                {"role": role, "content": "".join(self._template.blocks[role](context)).strip()}
                for role in ("system", "user")
            ]
        except Exception as error:  # a template is a program, and may raise anything
            raise GraderError(f"judge.template: {self.origin}: {type(error).__name__}: {error}") from error

    def _check(self) -> None:
        """A template must close each text in tags, and show the criteria after the response."""
        places = {"conversation": "QQQQ", "response": "RRRR", "criteria": "KKKK"}
        message = [{"role": "user", "content": places["conversation"]}]
        probe = [Criterion(places["criteria"], 1.0, {"bands": {"1-2": "low", "9-10": "high"}})]
        for scored, again in itertools.product((False, True), repeat=2):
            user = self.messages(message, places["response"], probe, scored=scored, again=again)[1]["content"]
            for name in ("response", "criteria"):
                if (shown := user.count(places[name])) != 1:
                    raise GraderError(
                        f"judge.template: {self.origin}: expected {name} once in block user, found {shown} times"
                    )
            if not re.search(r"<(\w[\w-]*)[^<>]*>\s*RRRR\s*</\1>", user):
                raise GraderError(
                    f"judge.template: {self.origin}: expected the response alone between tags, as in "
                    "<response>{{ response }}</response>: only then can its end not be forged"
                )
            if user.index(places["response"]) > user.index(places["criteria"]):
                raise GraderError(
                    f"judge.template: {self.origin}: expected the criteria after the response: the other way round "
                    "no server could reuse its work on the response"
                )


def answer_schema(count: int | None, *, scored: bool) -> dict[str, Any]:
    """`response_format` of the answer: for one criterion (None), or for criteria c1..c<count> in one answer."""
    result: dict[str, Any] = (
        {"score": {"type": "integer", "enum": list(range(LOWEST, HIGHEST + 1))}}
        if scored
        else {"criteria_met": {"type": "boolean"}}
    )
    if count is None:
        schema = _object({"explanation": {"type": "string"}, **result})
    else:
        identifier = {"type": "string", "enum": [f"c{number}" for number in range(1, count + 1)]}
        entry = _object({"id": identifier, "explanation": {"type": "string"}, **result})
        schema = _object({"verdicts": {"type": "array", "items": entry}})
    return {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
