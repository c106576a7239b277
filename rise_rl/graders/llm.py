"""Criteria judged by a language model behind an OpenAI-compatible server."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence

from ..rubric import Verdict
from .base import GradeItem
from .errors import JudgeUnavailable
from .judge_cache import VerdictCache, cache_key
from .judge_client import JudgeClient, api_key
from .judge_config import JudgeConfig
from .judge_prompt import JudgePrompt
from .judge_rows import RowJudge
from .judge_stats import JudgeStats
from .loop_thread import LoopThread

__all__ = ["JudgeConfig", "JudgeStats", "JudgeUnavailable", "LlmGrader"]


class LlmGrader:
    """Asks a judge about every criterion. A failure of any kind is an unknown verdict, counted by cause in `stats`.

    `grade` may be called from any thread, several at once, and from inside a running event loop (which it blocks).
    Raises JudgeUnavailable when the judge is plainly down or refuses the key, the model or every request.
    """

    def __init__(self, config: JudgeConfig) -> None:
        """Raises GraderError for a template or cache that cannot be used, or a key that is not there. Connects at first
        use.
        """
        self.config = config
        self.stats = JudgeStats()
        self._prompt = JudgePrompt(config.mode, config.template)
        self._session: _Session | None = None
        self._lock = threading.Lock()
        api_key(config)
        if config.cache_dir:
            VerdictCache(config.cache_dir).close()

    @property
    def identity(self) -> str:
        """A hash of all that decides what a verdict means: model, template, sampling, votes."""
        decides = {"model", "mode", "structured", "temperature", "max_tokens", "seed", "extra_body", "votes"}
        return cache_key(config=self.config.model_dump(include=decides), template=self._prompt.fingerprint)

    def grade(self, items: Sequence[GradeItem], *, repeat: int = 0) -> list[list[Verdict]]:
        """One verdict per criterion of every item. repeat: asks anew, with cache entries of its own (`judge_check`)."""
        session = self._open()
        judge = RowJudge(self.config, self._prompt, session.client, session.cache, self.stats, self.identity, repeat)
        return session.thread.run(judge.grade(items))

    def close(self) -> None:
        """Closes connections, cache and thread; the next `grade` opens them again."""
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def __enter__(self) -> LlmGrader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> _Session:
        with self._lock:
            if self._session is None or self._session.process != os.getpid():  # a fork does not inherit threads
                self._session = _Session(self.config, self.stats)
                weakref.finalize(self, self._session.close)
            return self._session


class _Session:
    """What is open: the cache, the thread, and the client that lives in the thread's loop."""

    def __init__(self, config: JudgeConfig, stats: JudgeStats) -> None:
        self.process = os.getpid()
        self.cache = VerdictCache(config.cache_dir) if config.cache_dir else None
        self.thread = LoopThread("rise-rl judge")
        self.client = self.thread.run(_connect(config, stats))
        self._closed = False

    def close(self) -> None:
        if self._closed or self.process != os.getpid():
            return
        self._closed = True
        self.thread.run(self.client.close())
        self.thread.stop()
        if self.cache is not None:
            self.cache.close()


async def _connect(config: JudgeConfig, stats: JudgeStats) -> JudgeClient:
    return JudgeClient(config, stats)
