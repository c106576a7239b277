"""Two thousand criterion calls while the server restarts half-way: no verdict is lost or doubled."""

import threading
import time

import pytest

from rise_rl.graders.base import GradeItem
from rise_rl.graders.judge_cache import VerdictCache
from rise_rl.graders.llm import JudgeConfig, LlmGrader
from rise_rl.rubric import Criterion
from tests.graders.fake_server import FakeJudge, criteria_of, truth

ROWS, CRITERIA, CONCURRENCY = 100, 20, 32


@pytest.mark.slow  # half a minute of HTTP on two cores
@pytest.mark.timeout(280)
def test_two_thousand_calls_over_a_restart(tmp_path):
    items = [
        GradeItem(
            str(i),
            [{"role": "user", "content": f"Question {i}. " + "It has some length. " * 50}],
            f"Answer {i}. " + "So has this. " * 100,
            [Criterion(f"fact {i}.{k}", 1.0) for k in range(CRITERIA)],
        )
        for i in range(ROWS)
    ]
    total = ROWS * CRITERIA
    with FakeJudge() as server:

        def restart():
            while server.answered < total // 2:
                time.sleep(0.01)
            server.stop()
            time.sleep(1.0)
            server.start()

        restarting = threading.Thread(target=restart)
        restarting.start()
        config = JudgeConfig(
            base_urls=(server.url,), concurrency=CONCURRENCY, backoff_s=0.05, backoff_max_s=1.0, max_retries=50,
            cache_dir=tmp_path,
        )  # fmt: skip
        with LlmGrader(config) as grader:
            start = time.monotonic()
            verdicts = grader.grade(items)
            seconds = time.monotonic() - start
            stats = grader.stats
        restarting.join(10)
        assert not restarting.is_alive()
    assert verdicts == [[float(truth(c.text)) for c in item.criteria] for item in items]
    assert (stats.criteria, stats.known, stats.unknown, stats.answered) == (total, total, {}, total)
    assert stats.retries > 0, "the restart was noticed"
    asked = [criteria_of(r)[0][1] for r in server.requests]
    assert len(set(asked)) == total
    assert len(asked) <= total + CONCURRENCY, "only what was in flight at the restart reached a server twice"
    cache = VerdictCache(tmp_path)
    assert len(cache) == total
    cache.close()
    assert seconds < 240
