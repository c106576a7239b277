"""Judge faults that the field has shipped: for each, bounded time, the right verdict or unknown, and honest counters.

A real HTTP server on 127.0.0.1 misbehaves for the first tries, or for good on one criterion ("poisoned") of several.
"""

import json
import socket
import time
from contextlib import contextmanager

import pytest

from rise_rl.graders.base import GradeItem
from rise_rl.graders.llm import JudgeConfig, JudgeUnavailable, LlmGrader
from rise_rl.rubric import Criterion, Rubric
from tests.graders.fake_server import FakeJudge, Reply, criteria_of, honest, truth, user_text

CRITERIA = [Criterion(f"names fact number {i}", 1.0 - 2.0 * (i == 2)) for i in range(5)] + [Criterion("poisoned", -3.0)]
RIGHT = [float(truth(c.text)) for c in CRITERIA]
ITEM = GradeItem("q1", [{"role": "user", "content": "Say something."}], "Something.", CRITERIA)
QUICK = {"backoff_s": 0.01, "backoff_max_s": 0.05, "timeout_s": 20.0, "deadline_s": 60.0, "max_retries": 4}
# For servers that do not answer: alone, a good call is far quicker, also on a machine with other work.
HASTY = {"timeout_s": 3.0, "concurrency": 1}


def grader_for(server, **options):
    return LlmGrader(JudgeConfig(base_urls=(server.url,), **{**QUICK, **options}))


class FirstThenHonest:
    """The fault for the first `count` requests."""

    def __init__(self, fault, count):
        self.fault, self.left = fault, count

    def __call__(self, request):
        self.left -= 1
        return self.fault if self.left >= 0 else honest(request)


def poisoned(fault):
    """The fault whenever the poisoned criterion is asked about."""

    def answer(request):
        return fault if ("poisoned" in {text for _, text in criteria_of(request)}) else honest(request)

    return answer


TRANSPORT = {
    "429": (Reply(status=429), "rate_limited"),
    "500": (Reply(status=500), "server_error"),
    "502": (Reply(status=502, raw=b"<html>bad gateway</html>"), "server_error"),
    "503": (Reply(status=503), "server_error"),
    "408": (Reply(status=408), "server_error"),
    "reset": (Reply(reset=True), "connection"),
    "no answer": (Reply("", delay=60.0), "timeout"),
    "an answer that drips": (Reply("x" * 200, drip=0.1), "timeout"),
    "a body that is HTML": (Reply(raw=b"<html>welcome</html>"), "bad_body"),
    "a body that is cut": (Reply(raw=b'{"id": "x", "choices": [{"ind'), "bad_body"),
    "an error in a 200": (Reply(raw=b'{"error": {"message": "overloaded"}}'), "bad_body"),
    "no choices": (Reply(raw=b'{"id": "x", "object": "chat.completion", "choices": []}'), "bad_body"),
}


@pytest.mark.parametrize("fault, cause", TRANSPORT.values(), ids=TRANSPORT)
def test_a_passing_fault_of_the_transport_changes_no_verdict(fault, cause):
    hasty, times = (HASTY, 1) if cause == "timeout" else ({}, 3)
    with FakeJudge(FirstThenHonest(fault, times)) as server, grader_for(server, **hasty) as grader:
        start = time.monotonic()
        assert grader.grade([ITEM]) == [RIGHT]
        assert time.monotonic() - start < 40.0
        stats = grader.stats
        assert (stats.retries, stats.calls, stats.answered) == (times, 6 + times, 6)
        assert len(server.requests) == 6 + times
        assert (stats.known, stats.unknown, stats.failed_calls, stats.asked_again) == (6, {}, {}, 0)


@pytest.mark.parametrize("fault, cause", TRANSPORT.values(), ids=TRANSPORT)
def test_a_lasting_fault_of_the_transport_is_unknown_and_never_not_met(fault, cause):
    hasty, retries = (HASTY, 1) if cause == "timeout" else ({}, 2)
    with FakeJudge(poisoned(fault)) as server, grader_for(server, max_retries=retries, **hasty) as grader:
        start = time.monotonic()
        [verdicts] = grader.grade([ITEM])
        assert time.monotonic() - start < 40.0
        assert verdicts == [*RIGHT[:-1], None]
        # "not met" would have rewarded the response for a negative criterion that nobody judged
        assert Rubric(CRITERIA).reward(verdicts) is None
        assert len(server.requests) == 5 + 1 + retries, "bounded tries"
        assert grader.stats.retries == retries
        assert (grader.stats.unknown, grader.stats.failed_calls) == ({cause: 1}, {cause: 1})


REFUSED = {
    "content filter as finish reason": (Reply("", finish_reason="content_filter"), "content_filter", 2),
    "content filter after a verdict": (
        Reply('{"criteria_met": true}', finish_reason="content_filter"),
        "content_filter",
        2,
    ),
    "content filter as a 400": (Reply(status=400, code="content_filter"), "content_filter", 2),
    "refusal": (Reply(None, refusal="I cannot help with that."), "refusal", 2),
    "prompt too long": (Reply(status=400, error="This model's maximum context length is 8192 tokens."), "too_long", 1),
    "context size": (
        Reply(status=400, error="the request exceeds the available context size", code="exceed_context_size_error"),
        "too_long",
        1,
    ),
    "context window": (Reply(status=400, error="Input exceeds the context window."), "too_long", 1),
    "a 400": (Reply(status=400, error="no"), "rejected", 1),
    "a 403": (Reply(status=403, error="blocked"), "rejected", 1),
}


@pytest.mark.parametrize("fault, cause, tries", REFUSED.values(), ids=REFUSED)
def test_a_request_that_is_refused_is_unknown_without_retries(fault, cause, tries):
    with FakeJudge(poisoned(fault)) as server, grader_for(server) as grader:
        assert grader.grade([ITEM]) == [[*RIGHT[:-1], None]]
        assert len(server.requests) == 5 + tries
        assert (grader.stats.retries, grader.stats.unknown) == (0, {cause: 1})


def form(template):
    """Answers with the right verdict in the given form."""

    def answer(request):
        met = truth(criteria_of(request)[0][1])
        return template(met) if callable(template) else Reply(template.replace("MET", str(met).lower()))

    return answer


READABLE = {
    "fenced": '```json\n{"explanation": "e", "criteria_met": MET}\n```',
    "prose around": 'My verdict is this: {"explanation": "e", "criteria_met": MET}. Good luck!',
    "single quotes": lambda met: Reply(str({"explanation": "it's so", "criteria_met": met})),
    "trailing comma": '{"explanation": "e", "criteria_met": MET,}',
    "text instead of a truth value": '{"explanation": "e", "criteria_met": "MET"}',
    "reasoning before": '<think>{"criteria_met": true}? {"criteria_met": false}?</think>{"criteria_met": MET}',
    "verdict before its explanation": '{"criteria_met": MET, "explanation": "e"}',
    "truncated after the object": lambda met: Reply(
        f'{{"explanation": "e", "criteria_met": {str(met).lower()}}}\nTo sum', finish_reason="length"
    ),
    "empty content with reasoning filled": lambda met: Reply(
        "", reasoning=f'I see. {{"explanation": "e", "criteria_met": {str(met).lower()}}}'
    ),
}


@pytest.mark.parametrize("template", READABLE.values(), ids=READABLE)
@pytest.mark.parametrize("structured", ["auto", "off"])
def test_a_readable_form_gives_the_right_verdict(template, structured):
    with FakeJudge(form(template)) as server, grader_for(server, structured=structured) as grader:
        assert grader.grade([ITEM]) == [RIGHT]
        assert (grader.stats.calls, grader.stats.known, grader.stats.unknown) == (6, 6, {})


UNREADABLE = {
    "truncated before the verdict": (Reply('{"explanation": "as the', finish_reason="length"), "truncated"),
    "truncated within the object": (
        Reply('{"criteria_met": true, "explanation": "as', finish_reason="length"),
        "truncated",
    ),
    "truncated prose": (Reply("Verdict: met", finish_reason="length"), "truncated"),
    "truncated word": (Reply("Met", finish_reason="length"), "truncated"),
    "truncated reasoning": (Reply("", reasoning='{"criteria_met": true}', finish_reason="length"), "truncated"),
    "empty": (Reply(""), "empty"),
    "no content": (Reply(None), "empty"),
    "only reasoning": (Reply("<think>it is met"), "empty"),
    "drafts in the reasoning only": (Reply("", reasoning='{"criteria_met": true}? Or not?'), "empty"),
    "prose": (Reply("The response does quite well on this."), "unparseable"),
    "contradiction": (Reply('{"criteria_met": true}\n{"criteria_met": false}'), "ambiguous"),
    "null": (Reply('{"explanation": "e", "criteria_met": null}'), "judge_unknown"),
    "a number between": (Reply('{"explanation": "e", "criteria_met": 0.5}'), "unparseable"),
}


@pytest.mark.parametrize("fault, cause", UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_answer_is_asked_once_more_and_then_unknown(fault, cause):
    with FakeJudge(poisoned(fault)) as server, grader_for(server) as grader:
        assert grader.grade([ITEM]) == [[*RIGHT[:-1], None]]
        assert (grader.stats.calls, grader.stats.asked_again, grader.stats.retries) == (7, 1, 0)
        assert grader.stats.unknown == {cause: 1}
        assert "could not be read" in server.requests[-1]["messages"][-1]["content"]


def test_an_answer_that_is_readable_the_second_time_counts():
    with FakeJudge(FirstThenHonest(Reply("Well."), 6)) as server, grader_for(server) as grader:
        assert grader.grade([ITEM]) == [RIGHT]
        assert (grader.stats.asked_again, grader.stats.unknown, len(server.requests)) == (6, {}, 12)


def batch(*entries):
    return Reply(json.dumps({"verdicts": [{"id": i, "explanation": "e", "criteria_met": m} for i, m in entries]}))


BATCHED = {
    "missing id": (batch(("c1", True), ("c2", False)), [1.0, 0.0, None], "missing_id"),
    "duplicate id": (batch(("c1", True), ("c2", False), ("c3", True), ("c3", True)), [1.0, 0.0, None], "duplicate_id"),
    "wrong id": (batch(("c1", True), ("c2", False), ("c7", True)), [1.0, 0.0, None], "missing_id"),
    "counted from zero": (batch(("c0", True), ("c1", False), ("c2", True)), [None] * 3, "ambiguous"),
    "truncated": (
        Reply('{"verdicts": [{"id": "c1", "criteria_met": true}, {"id": "c2", "crit', finish_reason="length"),
        [1.0, None, None],
        "truncated",
    ),
    "prose": (Reply("All are met."), [None] * 3, "unparseable"),
}


@pytest.mark.parametrize("fault, expected, cause", BATCHED.values(), ids=BATCHED)
def test_a_batched_answer_with_faults_is_unknown_only_where_it_is_faulty(fault, expected, cause):
    item = GradeItem("q", ITEM.messages, "r", CRITERIA[:3])
    unusable = Reply('{"verdicts": [{"id": "c9", "criteria_met": true}]}')
    with (
        FakeJudge(lambda request: unusable if len(server.requests) > 1 else fault) as server,
        grader_for(server, mode="batched") as grader,
    ):
        assert grader.grade([item]) == [expected]
        assert grader.stats.calls == 2, "the unknown ones are asked about once more, together"
        asked = [text for _, text in criteria_of(server.requests[1])]
        assert asked == [c.text for c, v in zip(CRITERIA, expected) if v is None]
        assert sum(grader.stats.unknown.values()) == expected.count(None)


def test_retry_after_is_waited_for():
    for value in ("0.6", "retry-after-ms"):
        headers = {"retry-after": value} if value != "retry-after-ms" else {"retry-after-ms": "600"}
        with (
            FakeJudge(FirstThenHonest(Reply(status=429, headers=headers), 1)) as server,
            grader_for(server, concurrency=1) as grader,
        ):
            assert grader.grade([ITEM]) == [RIGHT]
            assert server.arrivals[1] - server.arrivals[0] >= 0.59
            assert grader.stats.retries == 1


def test_a_retry_after_beyond_the_deadline_is_given_up_at_once():
    reply = Reply(status=429, headers={"retry-after": "3600"})
    with FakeJudge(lambda _: reply) as server, grader_for(server, concurrency=1, breaker_failures=99) as grader:
        start = time.monotonic()
        assert grader.grade([ITEM]) == [[None] * 6]
        assert time.monotonic() - start < 40.0  # the deadline of a row is 60 s
        assert len(server.requests) == 1
        assert (grader.stats.unknown, grader.stats.retries) == ({"rate_limited": 6}, 0)


@pytest.mark.parametrize("timeout_s", [0.3, 60.0])
def test_the_deadline_bounds_a_row_whatever_the_retries_and_time_outs(timeout_s):
    with (
        FakeJudge(lambda _: Reply("", delay=60.0)) as server,
        grader_for(server, deadline_s=0.8, timeout_s=timeout_s, max_retries=1000, breaker_failures=99) as grader,
    ):
        start = time.monotonic()
        assert grader.grade([ITEM]) == [[None] * 6]
        assert 0.7 < time.monotonic() - start < 40.0  # the server would take 60 s
        assert len(server.requests) <= 6 * 4


def test_a_row_that_runs_out_of_time_behind_a_slow_judge_does_not_stop_the_run():
    many = GradeItem("q", ITEM.messages, "r", [Criterion(f"c{i}", 1.0) for i in range(30)])
    with (
        FakeJudge(lambda r: Reply(honest(r).text, delay=0.2)) as server,
        grader_for(server, concurrency=1, deadline_s=3.0, breaker_failures=4) as grader,
    ):
        [verdicts] = grader.grade([many])
        assert 0 < sum(v is not None for v in verdicts) < 16
        assert set(grader.stats.unknown) == {"deadline"}
        assert len(server.requests) < 17


@contextmanager
def nobody():
    """A port that refuses connections and that nobody else can take meanwhile: bound, not listened to."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_a_dead_judge_stops_the_run_with_a_message():
    items = [GradeItem(str(i), ITEM.messages, "r", CRITERIA) for i in range(200)]
    with nobody() as port:
        url = f"http://127.0.0.1:{port}/v1"
        with LlmGrader(JudgeConfig(base_urls=(url,), breaker_failures=4, **{**QUICK, "max_retries": 1})) as grader:
            start = time.monotonic()
            with pytest.raises(JudgeUnavailable, match=rf"127\.0\.0\.1:{port}.*on 4 responses, all failed.*connection"):
                grader.grade(items)
            assert time.monotonic() - start < 60.0
            assert grader.stats.calls < 300, "the other rows are not tried"


def test_one_response_that_the_judge_rejects_does_not_stop_the_run():
    many = [Criterion(f"fact {i}", 1.0) for i in range(20)]
    bad, good = (GradeItem(r, ITEM.messages, r, many) for r in ("bad", "good"))

    def answer(request):
        return Reply(status=400, error="no") if "bad" in user_text(request) else honest(request)

    with FakeJudge(answer) as server, grader_for(server, concurrency=4, breaker_failures=3) as grader:
        assert grader.grade([bad, bad, good]) == [[None] * 20, [None] * 20, [float(truth(c.text)) for c in many]]
        with pytest.raises(JudgeUnavailable, match="on 3 responses"):
            grader.grade([bad, bad, bad])


def test_half_a_surrogate_pair_is_judged_like_any_text():
    torn = "a\ud800b"
    criterion = Criterion(torn, 1.0, {"bands": {"1-2": torn, "9-10": "fine"}})
    item = GradeItem("q", [{"role": "user", "content": torn}], torn, [criterion, Criterion(torn, 1.0)])
    with FakeJudge() as server, grader_for(server) as grader:
        assert None not in grader.grade([item])[0]
        assert (grader.stats.retries, len(server.requests)) == (0, 2)
        assert all(user_text(r).count("a\ufffdb") >= 3 for r in server.requests)


def test_a_few_failures_among_successes_do_not_stop_the_run():
    def answer(request):
        return Reply(status=500) if len(server.requests) % 3 else honest(request)

    with FakeJudge(answer) as server, grader_for(server, max_retries=0, breaker_failures=30) as grader:
        verdicts = grader.grade([ITEM] * 20)
    assert 0 < sum(v is None for row in verdicts for v in row) < 120
    assert all(v in (None, right) for row in verdicts for v, right in zip(row, RIGHT))


@pytest.mark.parametrize(
    "reply",
    [
        Reply(status=401, error="wrong key"),
        Reply(status=404, error="no such model"),
        Reply(status=429, code="insufficient_quota"),
    ],
    ids=lambda r: str(r.status),
)
def test_a_wrong_key_model_or_an_empty_account_stops_the_run_at_once(reply):
    with FakeJudge(lambda _: reply) as server, grader_for(server, concurrency=1) as grader:
        with pytest.raises(JudgeUnavailable, match=f"HTTP {reply.status}"):
            grader.grade([ITEM])
        assert len(server.requests) <= 2, "what was under way when the answer came"


def test_structured_outputs_fall_back_once_per_server():
    def old(request):
        if "response_format" in request:
            return Reply(status=400, error="Unknown parameter: response_format")
        return honest(request)

    with (
        FakeJudge(old) as first,
        FakeJudge() as second,
        LlmGrader(JudgeConfig(base_urls=(first.url, second.url), concurrency=2, **QUICK)) as grader,
    ):
        assert grader.grade([ITEM] * 4) == [RIGHT] * 4
        assert grader.stats.structured_fallbacks == 1
        assert sum("response_format" in r for r in first.requests) == 1
        assert all("response_format" in r for r in second.requests)
        assert len(second.requests) > 4


def test_structured_on_never_falls_back():
    reply = Reply(status=400, error="Unknown parameter: response_format")
    with FakeJudge(lambda _: reply) as server, grader_for(server, structured="on") as grader:
        assert grader.grade([ITEM]) == [[None] * 6]
        assert all("response_format" in r for r in server.requests)
        assert grader.stats.unknown == {"rejected": 6}


def test_a_retry_goes_to_another_server():
    """Whatever the load and the clock say, one dead server of two costs a call one try and no verdict."""
    with nobody() as port, FakeJudge() as alive:
        urls = (f"http://127.0.0.1:{port}/v1", alive.url)
        config = JudgeConfig(base_urls=urls, **{**QUICK, "backoff_max_s": 1e-9, "max_retries": 1})  # not shunned
        with LlmGrader(config) as grader:
            assert grader.grade([ITEM] * 5) == [RIGHT] * 5
            assert (grader.stats.answered, grader.stats.failed_calls) == (30, {})
            assert grader.stats.retries > 0


def test_a_server_that_fails_does_not_draw_the_calls_of_one_that_works():
    with nobody() as port, FakeJudge(lambda r: Reply(honest(r).text, delay=0.01)) as alive:
        urls = (f"http://127.0.0.1:{port}/v1", alive.url)
        config = JudgeConfig(base_urls=urls, concurrency=8, **{**QUICK, "backoff_max_s": 0.3})
        with LlmGrader(config) as grader:
            start = time.monotonic()
            assert grader.grade([ITEM] * 30) == [RIGHT] * 30
            # a dead server is always the least loaded one; it gets a probe every 0.3 s, not every second call
            assert grader.stats.retries <= 15 + (time.monotonic() - start) / 0.3
            assert len(alive.requests) == 180
