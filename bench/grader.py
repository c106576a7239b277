"""Twenty thousand criterion calls through the LLM grader, over a server that is killed and started again half-way.

    python bench/grader.py [--calls 20000] [--concurrency 64] [--latency 0.0]

The server is the tests' small one, in a process of its own, with a fixed latency per call. Three throughputs, in calls
per second with the same prompts and concurrency: the bare openai client, the grader, the grader over the restart. The
bare client and the undisturbed grader take turns in slices, so that a busy machine meets both alike. Every verdict is
compared with the right one, and the cache, which the grader fills as it goes, is counted: none lost, none doubled.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai

from rise_rl.graders.base import GradeItem
from rise_rl.graders.judge_cache import VerdictCache
from rise_rl.graders.judge_prompt import JudgePrompt, answer_schema
from rise_rl.graders.llm import JudgeConfig, LlmGrader
from rise_rl.rubric import Criterion

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from _common import environment, print_table, write_results  # noqa: E402

from tests.graders.fake_server import truth  # noqa: E402

CRITERIA = 20
SLICES = 5


def make_items(name: str, calls: int) -> list[GradeItem]:
    """Prompts of about 4 KB."""
    return [
        GradeItem(
            f"{name}{row}",
            [{"role": "user", "content": f"Question {name}{row}. " + "It goes on for a while. " * 40}],
            f"Answer {name}{row}. " + "So does this. " * 60,
            [Criterion(f"fact {name}{row}.{k}", 1.0) for k in range(CRITERIA)],
        )
        for row in range(calls // CRITERIA)
    ]


class Server:
    """The fake judge in its own process; `kill` and `start` again on the same port."""

    def __init__(self, latency: float) -> None:
        self.port, self.latency = 0, latency

    def start(self) -> None:
        program = str(ROOT / "tests" / "graders" / "fake_server.py")
        self.process = subprocess.Popen(
            [sys.executable, program, str(self.port), str(self.latency)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.port = int(self.url.split(":")[2].split("/")[0])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def bare(items: Sequence[GradeItem], url: str, concurrency: int) -> float:
    """Seconds that the openai client alone takes for the same requests; the answers are not looked at."""
    prompt, config = JudgePrompt("single"), JudgeConfig()
    requests: list[dict[str, Any]] = [
        {
            "model": config.model,
            "messages": prompt.messages(
                prompt.conversation(item.messages), prompt.field(item.response), [criterion], scored=False
            ),
            "temperature": 0.0,
            "max_tokens": config.max_tokens,
            "response_format": answer_schema(None, scored=False),
        }
        for item in items
        for criterion in item.criteria
    ]

    async def run() -> float:
        slots = asyncio.Semaphore(concurrency)
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def one(request: dict[str, Any]) -> None:
                async with slots:
                    await client.chat.completions.create(**request)

            await one(requests[0])  # imports and the first connection are not the point
            start = time.perf_counter()
            await asyncio.gather(*map(one, requests))
            return time.perf_counter() - start

    return asyncio.run(run())


def graded(items: Sequence[GradeItem], grader: LlmGrader) -> float:
    """Seconds that the grader takes; raises if one verdict is not the right one."""
    start = time.perf_counter()
    verdicts = grader.grade(items)
    seconds = time.perf_counter() - start
    wrong = [
        (item.uid, k)
        for item, row in zip(items, verdicts)
        for k, (criterion, verdict) in enumerate(zip(item.criteria, row, strict=True))
        if verdict != float(truth(criterion.text))
    ]
    if wrong:
        raise SystemExit(f"{len(wrong)} verdicts lost or wrong, the first: {wrong[0]}")
    return seconds


def count_cached(folder: Path, expected: int) -> None:
    cache = VerdictCache(folder)
    if len(cache) != expected:
        raise SystemExit(f"cache: expected {expected} verdicts, found {len(cache)}")
    cache.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds that the server takes over each call")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "grader.json")
    arguments = parser.parse_args()
    calls, concurrency = arguments.calls - arguments.calls % CRITERIA, arguments.concurrency
    compared = max(calls // 5 // SLICES // CRITERIA, 1) * CRITERIA

    server = Server(arguments.latency)
    server.start()
    with tempfile.TemporaryDirectory() as folder:
        config = JudgeConfig(
            base_urls=(server.url,),
            concurrency=concurrency,
            cache_dir=Path(folder),
            backoff_s=0.1,
            backoff_max_s=2.0,
            max_retries=50,
        )
        with LlmGrader(config) as grader:
            graded(make_items("warm", CRITERIA), grader)
            seconds = {"bare": 0.0, "grader": 0.0}
            for number in range(SLICES):
                items = make_items(f"slice{number}.", compared)
                seconds["bare"] += bare(items, server.url, concurrency)
                seconds["grader"] += graded(items, grader)

            before = grader.stats.answered

            def restart() -> None:
                while grader.stats.answered < before + calls // 2:
                    time.sleep(0.02)
                server.kill()
                time.sleep(1.0)
                server.start()

            restarting = threading.Thread(target=restart, daemon=True)
            restarting.start()
            over_restart = graded(make_items("main", calls), grader)
            restarting.join(60)
            stats = grader.stats.summary()
        server.kill()
        count_cached(Path(folder), CRITERIA + SLICES * compared + calls)

    rates = {
        "bare openai client": SLICES * compared / seconds["bare"],
        "grader": SLICES * compared / seconds["grader"],
        "grader over a restart": calls / over_restart,
    }
    print_table(["calls per second", "rate"], [[name, f"{rate:.1f}"] for name, rate in rates.items()])
    print(f"{calls} calls over a restart: {stats['retries']} retries, no verdict lost, wrong or doubled")
    write_results(
        arguments.output,
        {
            "environment": environment("cpu") | {"openai": openai.__version__, "load": os.getloadavg()[0]},
            "calls": calls,
            "calls_compared": SLICES * compared,
            "concurrency": concurrency,
            "server_latency_s": arguments.latency,
            "calls_per_second": rates,
            "stats": stats,
        },
    )


if __name__ == "__main__":
    main()
