"""Calls to the judge's servers: least loaded first, retried, bounded in number and time, given up loudly.

Backoff is exponential with full jitter (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
"""

from __future__ import annotations

import asyncio
import email.utils
import os
import random
import re
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from .errors import GraderError, JudgeUnavailable
from .judge_config import JudgeConfig
from .judge_stats import JudgeStats

RETRIED_STATUS = frozenset([408, 409, 425, 429])
_TOO_LONG = re.compile(r"context[ _](?:length|size|window)|maximum model length")
LIVING_CAUSES = frozenset(["content_filter", "too_long"])  # refusals of one request by a server that is well


@dataclass(frozen=True)
class Answer:
    """One completed call. cause: why there is no usable text ("content_filter", "refusal"), or ""."""

    text: str
    reasoning: str
    finish_reason: str
    cause: str = ""


class CallFailed(Exception):
    """A call that is given up. cause: for the counters."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause


class _TryFailed(Exception):
    """One try of a call failed. again: another may succeed. retry_after: seconds the server asked for. fatal: no call
    will ever succeed. tried: False if the time was up before anything was asked."""

    def __init__(
        self,
        cause: str,
        detail: str,
        *,
        again: bool,
        retry_after: float = 0.0,
        fatal: bool = False,
        tried: bool = True,
    ) -> None:
        super().__init__(detail)
        self.cause, self.again, self.retry_after = cause, again, retry_after
        self.fatal, self.tried = fatal, tried


@dataclass
class _Server:
    """paused_until: no call before (the server said so). shunned_until: others are preferred (it failed)."""

    url: str
    client: openai.AsyncOpenAI
    structured: bool
    in_flight: int = 0
    calls: int = 0
    failures: int = 0
    paused_until: float = 0.0
    shunned_until: float = 0.0


class JudgeClient:
    """Made and used inside one event loop."""

    def __init__(self, config: JudgeConfig, stats: JudgeStats) -> None:
        self.config, self.stats = config, stats
        key = api_key(config)
        self._servers = [
            _Server(
                url,
                # No time-out of its own: it would bound each read, not the call, which `_try` bounds as a whole.
                openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=None),
                structured=config.structured != "off",
            )
            for url in config.base_urls
        ]
        self._slots = asyncio.Semaphore(config.concurrency)
        self._failed_rows: set[Hashable] = set()  # since the last success
        self._clock = asyncio.get_running_loop().time

    async def ask(
        self, messages: Sequence[dict[str, str]], schema: dict[str, Any], deadline: float, row: Hashable, vote: int = 0
    ) -> Answer:
        """deadline: on the event loop's clock. row: the response that is judged; its calls may all fail for a reason
        of its own. Raises CallFailed, or JudgeUnavailable to stop the run."""
        failure: _TryFailed | None = None
        failed_at: list[str] = []  # a retry goes elsewhere, if there is elsewhere: one dead server fails no call
        for attempt in range(self.config.max_retries + 1):
            if attempt:
                delay = self._jitter(attempt)
                if self._clock() + delay >= deadline:
                    break
                await asyncio.sleep(delay)
            async with self._slots:
                server = self._pick(failed_at)
                try:
                    await self._wait_for(server, deadline)
                    self.stats.retries += attempt > 0
                    answer = await self._send(server, messages, schema, deadline, vote)
                except _TryFailed as error:
                    self._note_failure(server, error)
                    failed_at.append(server.url)
                    failure = error if error.tried or failure is None else failure
                    if not error.again:
                        break
                else:
                    server.failures, server.shunned_until = 0, 0.0
                    self._failed_rows.clear()
                    return answer
        assert failure is not None
        self._give_up(failure, row)
        raise CallFailed(failure.cause, str(failure))

    async def close(self) -> None:
        for server in self._servers:
            await server.client.close()

    def _pick(self, failed_at: Sequence[str]) -> _Server:
        """failed_at: the servers of this call's earlier tries."""
        now = self._clock()
        server = min(
            self._servers,
            key=lambda s: (
                max(s.paused_until - now, 0.0),
                failed_at.count(s.url),
                s.shunned_until > now,
                s.in_flight,
                s.calls,
            ),
        )
        if server.failures:  # this call is the probe; the others keep away until it is answered
            server.shunned_until = now + self.config.backoff_max_s
        return server

    async def _wait_for(self, server: _Server, deadline: float) -> None:
        """Waits until the server may be asked. Raises _TryFailed if that is past the deadline."""
        pause = server.paused_until - self._clock()
        if pause > 0:
            pause += random.uniform(0.0, self.config.backoff_s)  # or all who wait would come at once
            if self._clock() + pause >= deadline:
                raise _TryFailed("rate_limited", f"{server.url} asks to wait {pause:.0f} s, too long", again=False)
            await asyncio.sleep(pause)
        if self._clock() >= deadline:
            raise _TryFailed("deadline", "no time was left to ask", again=False, tried=False)

    def _jitter(self, attempt: int) -> float:
        return random.uniform(0.0, min(self.config.backoff_max_s, self.config.backoff_s * 2.0 ** min(attempt - 1, 60)))

    async def _send(
        self, server: _Server, messages: Sequence[dict[str, str]], schema: dict[str, Any], deadline: float, vote: int
    ) -> Answer:
        """One try; twice if the server turns out not to know structured outputs."""
        structured = server.structured
        try:
            return await self._try(server, messages, schema if structured else None, deadline, vote)
        except openai.APIStatusError as error:
            # Calls that were under way when the first one found out also come here: they must ask again, not fall back.
            if not (structured and self.config.structured == "auto" and _names_structured(error)):
                raise _classify(error) from error
            if server.structured:
                server.structured = False
                self.stats.structured_fallbacks += 1
        try:
            return await self._try(server, messages, None, deadline, vote)
        except openai.APIStatusError as error:
            raise _classify(error) from error

    async def _try(
        self,
        server: _Server,
        messages: Sequence[dict[str, str]],
        schema: dict[str, Any] | None,
        deadline: float,
        vote: int,
    ) -> Answer:
        """One HTTP request. Lets APIStatusError through; every other failure is a _TryFailed."""
        request: dict[str, Any] = {"model": self.config.model, "messages": list(messages)}
        request["temperature"] = self.config.temperature
        if self.config.max_tokens is not None:
            request["max_tokens"] = self.config.max_tokens
        if self.config.seed is not None:
            request["seed"] = self.config.seed + vote
        if schema is not None:
            request["response_format"] = schema
        start = self._clock()
        limit = min(self.config.timeout_s, deadline - start)
        self.stats.calls += 1
        server.calls += 1
        server.in_flight += 1
        try:
            completion = await asyncio.wait_for(
                server.client.chat.completions.create(**request, extra_body=self.config.extra_body or None), limit
            )
        except (asyncio.TimeoutError, openai.APITimeoutError):
            cause = "timeout" if limit == self.config.timeout_s else "deadline"
            raise _TryFailed(cause, f"no answer from {server.url} within {limit:.1f} s", again=True) from None
        except openai.APIStatusError:
            raise
        except openai.APIConnectionError as error:
            raise _TryFailed("connection", f"{server.url}: {error.__cause__ or error}", again=True) from error
        except (openai.APIError, ValueError) as error:
            raise _TryFailed("bad_body", f"{server.url}: {error}", again=True) from error
        finally:
            server.in_flight -= 1
        answer = _answer(completion, server.url)
        self.stats.answered += 1
        self.stats.latencies.append(self._clock() - start)
        usage = getattr(completion, "usage", None)
        self.stats.prompt_tokens += getattr(usage, "prompt_tokens", None) or 0
        self.stats.completion_tokens += getattr(usage, "completion_tokens", None) or 0
        return answer

    def _note_failure(self, server: _Server, error: _TryFailed) -> None:
        now = self._clock()
        if error.retry_after:
            server.paused_until = max(server.paused_until, now + error.retry_after)
        if error.again:
            server.failures += 1
            server.shunned_until = now + min(
                self.config.backoff_max_s, self.config.backoff_s * 2.0 ** min(server.failures - 1, 60)
            )

    def _give_up(self, failure: _TryFailed, row: Hashable) -> None:
        """Counts a call that failed for good, and stops the run if nothing else succeeds any more."""
        self.stats.failed_calls[failure.cause] += 1
        where = f"judge {self.config.model} at {', '.join(self.config.base_urls)}"
        if failure.fatal:
            raise JudgeUnavailable(f"{where}: {failure}")
        if failure.cause in LIVING_CAUSES or not failure.tried:
            return
        self._failed_rows.add(row)
        if (failed := len(self._failed_rows)) >= self.config.breaker_failures:
            self._failed_rows.clear()
            raise JudgeUnavailable(
                f"{where}: the latest calls, on {failed} responses, all failed, each with up to "
                f"{self.config.max_retries} retries within {self.config.deadline_s:g} s; the latest: "
                f"{failure.cause}: {failure}. No verdict was made up; start the judge, or check "
                "judge.base_urls, and resume"
            )


def api_key(config: JudgeConfig) -> str:
    """The key from the environment. Raises GraderError if the variable named by `api_key_env` is not set."""
    if config.api_key_env is None:
        return "none"  # the client insists on one
    key = os.environ.get(config.api_key_env)
    if not key:
        raise GraderError(f"judge.api_key_env: the environment variable {config.api_key_env} is not set")
    return key


def _answer(completion: Any, url: str) -> Answer:
    """The first choice. Raises _TryFailed if the body is no chat completion."""
    choices = getattr(completion, "choices", None)
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = getattr(choice, "message", None)
    if message is None:
        raise _TryFailed("bad_body", f"{url}: the answer is no chat completion: {str(completion)[:200]!r}", again=True)
    finish_reason = getattr(choice, "finish_reason", None) or ""
    reasoning = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    cause = ""
    if finish_reason == "content_filter":
        cause = "content_filter"
    elif getattr(message, "refusal", None):
        cause = "refusal"
    text = getattr(message, "content", None)
    return Answer(
        text if isinstance(text, str) else "", reasoning if isinstance(reasoning, str) else "", finish_reason, cause
    )


def _error_text(error: openai.APIStatusError) -> str:
    """Everything the server said, in lower case."""
    return f"{error.code or ''} {error.message} {error.body or ''}".lower()


def _names_structured(error: openai.APIStatusError) -> bool:
    names = ("response_format", "json_schema", "structured", "guided", "grammar")
    return error.status_code in (400, 422, 501) and any(name in _error_text(error) for name in names)


def _classify(error: openai.APIStatusError) -> _TryFailed:
    status, said = error.status_code, _error_text(error)
    detail = f"{error.request.url}: HTTP {status}: {error.message[:300]}"
    if status in (401, 404) or "insufficient_quota" in said:
        return _TryFailed("refused", detail, again=False, fatal=True)
    if status in RETRIED_STATUS or status >= 500:
        cause = "rate_limited" if status == 429 else "server_error"
        return _TryFailed(cause, detail, again=True, retry_after=_retry_after(error))
    if "content_filter" in said or "content_policy" in said or "content management policy" in said:
        return _TryFailed("content_filter", detail, again=False)
    if status == 413 or _TOO_LONG.search(said):
        return _TryFailed("too_long", detail, again=False)
    return _TryFailed("rejected", detail, again=False)


def _retry_after(error: openai.APIStatusError) -> float:
    """Seconds from Retry-After (a number or an HTTP date) or retry-after-ms; 0 if there is none."""
    headers = error.response.headers
    for value, unit in ((headers.get("retry-after-ms"), 1e-3), (headers.get("retry-after"), 1.0)):
        if value is None:
            continue
        try:
            seconds = float(value) * unit
        except ValueError:
            date = email.utils.parsedate_tz(value)
            seconds = email.utils.mktime_tz(date) - time.time() if date else 0.0
        if 0.0 < seconds < float("inf"):
            return seconds
    return 0.0
