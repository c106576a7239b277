"""The cache of verdicts: what is kept, what tells two questions apart, several writers, a killed one."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from rise_rl.graders.base import GradeItem
from rise_rl.graders.errors import GraderError
from rise_rl.graders.judge_cache import VerdictCache, cache_key
from rise_rl.rubric import Criterion
from tests.graders.fake_server import FakeJudge, Reply, criteria_of, honest
from tests.graders.judging import BANDS, CHAT, grader_for, item, right


@pytest.mark.parametrize("mode", ["single", "batched"])
def test_known_verdicts_are_cached_and_unknown_ones_are_not(tmp_path, mode):
    judged = item(criteria=[Criterion(t, 1.0) for t in ("a", "poisoned", "b")])
    [expected] = [right(judged)]
    poison = True

    def answer(request):
        """No verdict on the poisoned criterion, as long as there is poison."""
        reply, listed = honest(request), criteria_of(request)
        if poison and listed[-1][1] == "poisoned":
            return Reply("hm")
        return Reply(reply.text.replace('"c2"', '"c9"') if poison else reply.text)

    with FakeJudge(answer) as server, grader_for(server, mode=mode, cache_dir=tmp_path) as grader:
        assert grader.grade([judged]) == [[expected[0], None, expected[2]]]
        poison, asked = False, len(server.requests)
        assert grader.grade([judged]) == [expected]
        assert len(server.requests) == asked + 1, "only the unknown one is asked about"
        assert [text for _, text in criteria_of(server.requests[-1])] == ["poisoned"]
    with FakeJudge() as server, grader_for(server, mode=mode, cache_dir=tmp_path) as again:
        assert again.grade([judged]) == [expected]
        assert (len(server.requests), again.stats.cache_hits, again.stats.calls) == (0, 3, 0)


def test_the_cache_key_holds_everything_that_could_change_the_answer(tmp_path):
    base = GradeItem("q", CHAT, "A response.", [Criterion("a", 1.0)])
    template = tmp_path / "own.j2"
    template.write_text(
        "{% block system %}One{% endblock %}{% block user %}<response>{{ response }}</response>\n"
        "{% for c in criteria %}<criterion>\n{{ c.text }}\n</criterion>{% endfor %}{% endblock %}"
    )
    with FakeJudge() as server:

        def asks(graded=base, repeat=0, **options):
            before = len(server.requests)
            with grader_for(server, cache_dir=tmp_path / "cache", **options) as grader:
                grader.grade([graded], repeat=repeat)
            return len(server.requests) - before

        assert asks() == 1
        assert asks() == 0
        other_weight_and_name = GradeItem("other", CHAT, "A response.", [Criterion("a", -5.0, {"axis": "x"})])
        assert asks(other_weight_and_name) == 0
        changes = [
            {"graded": GradeItem("q", [{"role": "user", "content": "Other."}], "A response.", base.criteria)},
            {"graded": GradeItem("q", CHAT, "Another response.", base.criteria)},
            {"graded": GradeItem("q", CHAT, "A response.", [Criterion("b", 1.0)])},
            {"graded": GradeItem("q", CHAT, "A response.", [Criterion("a", 1.0, BANDS)])},
            {"model": "other"},
            {"temperature": 0.1},
            {"max_tokens": 9},
            {"seed": 1},
            {"extra_body": {"top_p": 0.9}},
            {"mode": "batched"},
            {"template": template},
            {"repeat": 1},
        ]
        for change in changes:
            assert asks(**change) == 1, change
            assert asks(**change) == 0, change
        template.write_text(template.read_text().replace("One", "Two"))
        assert asks(template=template) == 1
        assert asks(votes=3, temperature=1.0) == 3


def test_neighbouring_texts_do_not_run_together_in_the_key():
    assert cache_key(a="xy", b="z") != cache_key(a="x", b="yz")
    assert cache_key(a=["x", "y"]) != cache_key(a=["x,y"])


def test_one_cache_serves_several_graders_at_once(tmp_path):
    items = [item(str(i)) for i in range(30)]
    results = []
    with FakeJudge() as server:

        def work():
            with grader_for(server, cache_dir=tmp_path) as grader:
                results.append(grader.grade(items))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
    assert results == [[right(i) for i in items]] * 3
    cache = VerdictCache(tmp_path)
    assert len(cache) == 120
    cache.close()


def test_a_killed_writer_leaves_a_cache_that_works(tmp_path):
    program = textwrap.dedent(
        f"""
        import itertools
        from pathlib import Path
        from rise_rl.graders.judge_cache import VerdictCache
        cache = VerdictCache(Path({str(tmp_path)!r}))
        for i in itertools.count():
            cache.put(f"key-{{i}}", (i % 10) / 9)
            print(i, flush=True)
        """
    )
    for _ in range(2):
        writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        written = [int(writer.stdout.readline()) for _ in range(200)]
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        cache = VerdictCache(tmp_path)
        assert [cache.get(f"key-{i}") for i in written] == [(i % 10) / 9 for i in written]
        cache.put("after", 1.0)
        assert cache.get("after") == 1.0
        cache.close()


def test_what_is_no_verdict_in_the_cache_counts_as_absent(tmp_path):
    cache = VerdictCache(tmp_path)
    for value in (7.0, "yes", b"x", [1.0]):
        cache._cache.set("key", value)
        assert cache.get("key") is None
    cache.close()


def test_a_cache_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(GraderError, match=r"judge\.cache_dir"):
        VerdictCache(tmp_path / "file")
