"""Options of the LLM judge; unknown keys are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class JudgeConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str = Field("openai/gpt-oss-120b", min_length=1, description="The judge's name as its server knows it.")
    base_urls: tuple[str, ...] = Field(
        ("http://127.0.0.1:8000/v1",),
        min_length=1,
        description="OpenAI-compatible servers of the same model; each call goes to the least loaded one.",
    )
    api_key_env: str | None = Field(
        None, description="Name of the environment variable that holds the key; null for servers that need none."
    )
    mode: Literal["single", "batched"] = Field(
        "single", description="One criterion per call, or all criteria of a response in one call (cheaper, less exact)."
    )
    template: Path | None = Field(None, description="A jinja2 template instead of the mode's own; see docs/grading.md.")
    structured: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Ask for a JSON schema: on, off, or auto (until a server answers 400 and names it as the reason).",
    )
    temperature: float = Field(0.0, ge=0, description="Sampling temperature of the judge.")
    max_tokens: int | None = Field(
        4096, ge=1, description="Longest answer in tokens, reasoning included; null: the server decides."
    )
    seed: int | None = Field(None, description="Sampling seed; vote v sends seed + v. Null: none is sent.")
    extra_body: dict[str, Any] = Field(
        default_factory=dict, description="More fields of the request, e.g. {reasoning_effort: low}."
    )
    votes: int = Field(1, ge=1, description="Answers per criterion; the verdict needs a majority of them. Odd.")
    concurrency: int = Field(64, ge=1, le=1000, description="Calls in flight at once, over all servers.")
    timeout_s: float = Field(120.0, gt=0, description="Seconds until one call is given up.")
    deadline_s: float = Field(
        600.0, gt=0, description="Seconds for all calls of one response, counted from when its first call may start."
    )
    max_retries: int = Field(
        8, ge=0, description="Further tries of a call after a time-out, a lost connection, 408, 409, 425, 429 or 5xx."
    )
    backoff_s: float = Field(0.5, gt=0, description="After try n: a random wait up to backoff_s * 2**(n-1) seconds.")
    backoff_max_s: float = Field(30.0, gt=0, description="Upper end of that random time.")
    breaker_failures: int = Field(
        16, ge=1, description="Responses with calls that fail for good, no call succeeding, before the run stops."
    )
    cache_dir: Path | None = Field(None, description="Folder of the verdict cache; null: no cache.")

    @field_validator("base_urls")
    @classmethod
    def _with_scheme(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.netloc:
                raise ValueError(
                    "expected addresses that begin with http:// or https://, such as http://localhost:8000/v1"
                )
        return urls

    @model_validator(mode="after")
    def _consistent(self) -> JudgeConfig:
        if self.votes % 2 == 0:
            raise ValueError(f"votes: expected an odd number, so that there is a majority, found {self.votes}")
        if self.votes > 1 and self.temperature == 0:
            raise ValueError("votes: at temperature 0 every vote is the same answer; set temperature, or votes to 1")
        own = {"model", "messages", "temperature", "max_tokens", "seed", "response_format", "stream"}
        if taken := sorted(own & set(self.extra_body)):
            raise ValueError(f"extra_body: {', '.join(taken)} has a key of its own or is set by the grader")
        return self
