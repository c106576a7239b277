"""From responses to verdicts: ask for what the cache lacks, once more for what stays unclear, count the votes."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..rubric import Criterion, Verdict
from .bands import bands
from .base import GradeItem
from .judge_cache import VerdictCache, cache_key
from .judge_client import Answer, CallFailed, JudgeClient
from .judge_config import JudgeConfig
from .judge_prompt import JudgePrompt, answer_schema
from .judge_stats import JudgeStats
from .loop_thread import cancel_all, finish_all, run_all
from .parse import TRUNCATED, Reading, read_batch, read_score, read_verdict


@dataclass
class _Vote:
    """One vote on one response, by the criterion's place. final: failures that asking again would only repeat."""

    number: int
    keys: list[str]
    readings: dict[int, Reading] = field(default_factory=dict)
    final: set[int] = field(default_factory=set)

    def open(self, again: bool) -> list[int]:
        """The criteria to ask about, the first time or again."""
        if not again:
            return [k for k in range(len(self.keys)) if k not in self.readings]
        return [k for k, r in sorted(self.readings.items()) if r.verdict is None and k not in self.final]


@dataclass(eq=False)
class _Row:
    """One response, its texts as the judge sees them."""

    criteria: Sequence[Criterion]
    scored: list[bool]
    conversation: list[dict[str, str]]
    response: str
    votes: list[_Vote]


class RowJudge:
    """One `grade` call, inside the client's event loop."""

    def __init__(
        self,
        config: JudgeConfig,
        prompt: JudgePrompt,
        client: JudgeClient,
        cache: VerdictCache | None,
        stats: JudgeStats,
        identity: str,
        repeat: int,
    ) -> None:
        self.config, self.prompt, self.client, self.cache, self.stats = config, prompt, client, cache, stats
        self.identity, self.repeat = identity, repeat
        self._waiting = 0  # first calls of the admitted rows that are not done
        self._done = asyncio.Event()

    async def grade(self, items: Sequence[GradeItem]) -> list[list[Verdict]]:
        """Rows are let in only when calls would otherwise idle: a row's deadline runs from when its calls may start,
        and calls that retry do not queue behind the whole batch."""
        rows: list[_Row] = []
        tasks: list[asyncio.Task[None]] = []
        try:
            for item in items:
                row = self._row(item)
                rows.append(row)
                calls = sum(len(self._groups(row, vote.open(again=False))) for vote in row.votes)
                if not calls:
                    continue
                self._raise_failures(tasks)
                while self._waiting >= self.config.concurrency:
                    self._done.clear()
                    await self._done.wait()
                    self._raise_failures(tasks)
                tasks = [task for task in tasks if not task.done()]
                self._waiting += calls
                task = asyncio.create_task(self._judge(row))
                task.add_done_callback(lambda _: self._done.set())
                tasks.append(task)
            await finish_all(tasks)
        finally:
            await cancel_all(tasks)
        return [[self._verdict(row, k) for k in range(len(row.criteria))] for row in rows]

    @staticmethod
    def _raise_failures(tasks: Sequence[asyncio.Task[None]]) -> None:
        """Raises what stops the run: the calls of a row that failed are not counted down."""
        for task in tasks:
            if task.done():
                task.result()

    def _row(self, item: GradeItem) -> _Row:
        conversation, response = self.prompt.conversation(item.messages), self.prompt.field(item.response)
        shared = cache_key(judge=self.identity, conversation=conversation, response=response)
        scored = [bands(criterion) is not None for criterion in item.criteria]
        votes = []
        for number in range(self.config.votes):
            vote = _Vote(
                number,
                [
                    cache_key(shared=shared, criterion=c.text, bands=bands(c), vote=number, repeat=self.repeat)
                    for c in item.criteria
                ],
            )
            for k, key in enumerate(vote.keys):
                verdict = None if self.cache is None else self.cache.get(key)
                if verdict is not None:
                    vote.readings[k] = Reading(verdict)
                    self.stats.cache_hits += 1
            votes.append(vote)
        return _Row(item.criteria, scored, conversation, response, votes)

    def _groups(self, row: _Row, places: Sequence[int]) -> list[list[int]]:
        """The criteria of each call. Scored ones and met-or-not ones do not share a call."""
        if self.config.mode == "single":
            return [[k] for k in places]
        kinds = ([k for k in places if row.scored[k] is scored] for scored in (False, True))
        return [kind for kind in kinds if kind]

    async def _judge(self, row: _Row) -> None:
        deadline = asyncio.get_running_loop().time() + self.config.deadline_s
        await run_all(self._vote(row, vote, deadline) for vote in row.votes)

    async def _vote(self, row: _Row, vote: _Vote, deadline: float) -> None:
        for again in (False, True):
            groups = self._groups(row, vote.open(again))
            await run_all(self._ask(row, vote, group, again, deadline) for group in groups)

    async def _ask(self, row: _Row, vote: _Vote, group: Sequence[int], again: bool, deadline: float) -> None:
        criteria, scored = [row.criteria[k] for k in group], row.scored[group[0]]
        schema = answer_schema(None if self.config.mode == "single" else len(group), scored=scored)
        self.stats.asked_again += again
        try:
            messages = self.prompt.messages(row.conversation, row.response, criteria, scored=scored, again=again)
            answer = await self.client.ask(messages, schema, deadline, row, vote.number)
        except CallFailed as error:
            readings = [Reading(None, error.cause)] * len(group)
            if error.cause != "content_filter":
                vote.final.update(group)
        else:
            readings = self._read(answer, row.response, len(group), scored)
        finally:
            if not again:
                self._waiting -= 1
                self._done.set()
        for k, reading in zip(group, readings, strict=True):
            vote.readings[k] = reading
            if self.cache is not None and reading.verdict is not None:
                self.cache.put(vote.keys[k], reading.verdict)

    def _read(self, answer: Answer, response: str, count: int, scored: bool) -> list[Reading]:
        if answer.cause:
            return [Reading(None, answer.cause)] * count
        truncated = answer.finish_reason == "length"
        reasoning = "" if truncated else answer.reasoning
        if self.config.mode == "batched":
            readings = read_batch(
                answer.text, count, scored=scored, reasoning=reasoning, response=response, truncated=truncated
            )
        else:
            read = read_score if scored else read_verdict
            readings = [read(answer.text, reasoning=reasoning, response=response, truncated=truncated)]
        if truncated:
            readings = [r if r.verdict is not None else TRUNCATED for r in readings]
        return readings

    def _verdict(self, row: _Row, k: int) -> Verdict:
        """A majority of all votes (for scores: the median, if a majority gave one; of two in the middle the
        lower, as a mean would be a score that no vote gave)."""
        readings = [vote.readings[k] for vote in row.votes]
        values = [r.verdict for r in readings if r.verdict is not None]
        needed = len(readings) // 2 + 1
        self.stats.criteria += 1
        verdict: Verdict = None
        if len(values) >= needed:
            if row.scored[k]:
                verdict = statistics.median_low(values)
            else:
                value, count = Counter(values).most_common(1)[0]
                verdict = value if count >= needed else None
        if verdict is None:
            causes = Counter(r.cause for r in readings if r.verdict is None).most_common(1)
            self.stats.unknown[causes[0][0] if len(values) < needed else "no_majority"] += 1
        else:
            self.stats.known += 1
        return verdict
