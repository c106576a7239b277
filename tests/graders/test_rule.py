"""The rule grader and routing: exact verdicts, no failure that becomes one, and errors before a run starts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rise_rl.graders import GradeItem, RoutingGrader, RuleGrader, band_verdict, bands, required_routes, route, validate
from rise_rl.graders.checks import CHECKS, CheckError, check
from rise_rl.graders.checks.__main__ import insert
from rise_rl.rubric import Criterion, Rubric


def rule(function, weight=1.0, **parameters):
    return Criterion("a wish", weight, {"verifier": "rule", "function": function, "parameters": parameters})


def item(response, *criteria, uid="u"):
    return GradeItem(uid, [{"role": "user", "content": "?"}], response, criteria)


@pytest.fixture
def own_check():
    """Registers a check for one test."""
    names = []

    def register(name, function):
        check(name, "a wish")(function)
        names.append(name)

    yield register
    for name in names:
        del CHECKS[name]


def test_verdicts_come_in_the_order_of_items_and_criteria():
    water, hello = rule("rise:contains_any", words=["water"]), rule("rise:starts_with", phrases=["Hello"])
    items = [item("Hello", water, hello), item("water", hello, water), item("Hello water", water)]
    assert RuleGrader().grade(items) == [[0.0, 1.0], [0.0, 1.0], [1.0]]


@pytest.mark.parametrize("response", ["", "  \n"])
def test_an_empty_response_meets_no_check_not_even_a_limit(response):
    grader = RuleGrader()
    criteria = [
        rule("rise:max_words", num_words=5),
        rule("punctuation:no_comma"),
        rule("rise:contains_none", words=["x"]),
    ]
    assert grader.grade([item(response, *criteria)]) == [[0.0, 0.0, 0.0]]
    assert not grader.failures


THOUGHT = "<think>\nOkay, a ZEBRA, very short.\n</think>"
OPENED_BY_THE_PROMPT = "Okay, a ZEBRA, very short.\n</think>"


@pytest.mark.parametrize("thought", ["", THOUGHT, OPENED_BY_THE_PROMPT, THOUGHT.replace("think", "reasoning")])
def test_reasoning_is_not_what_is_checked(thought):
    criteria = [
        rule("punctuation:no_comma"),
        rule("change_case:english_lowercase"),
        rule("rise:max_words", num_words=4),
        rule("startend:quotation"),
        rule("keywords:existence", keywords=["zebra"]),
    ]
    response = thought + '\n\n"the sky is blue."\n'
    assert RuleGrader().grade([item(response, *criteria)]) == [[1.0, 1.0, 1.0, 1.0, 0.0]]


def test_an_answer_cut_inside_its_thought_is_empty():
    criteria = [rule("punctuation:no_comma"), rule("keywords:existence", keywords=["zebra"])]
    assert RuleGrader().grade([item("<think>a zebra maybe", *criteria)]) == [[0.0, 0.0]]


def test_white_space_of_an_answer_without_reasoning_is_left_to_the_checks(own_check):
    def indented(response: str) -> bool:
        return response.startswith("  ")

    own_check("test:indented", indented)
    assert RuleGrader().grade([item("  a", rule("test:indented"))]) == [[1.0]]


def test_a_check_that_raises_is_unknown_and_counted(own_check, caplog):
    def broken(response: str, *, n: int) -> bool:
        raise RuntimeError("boom")

    own_check("test:broken", broken)
    grader = RuleGrader()
    assert grader.grade([item("a", rule("test:broken", n=1), rule("punctuation:no_comma"))] * 3) == [[None, 1.0]] * 3
    assert grader.failures == {"test:broken": 3}
    assert len(caplog.records) == 1
    assert "RuntimeError: boom" in caplog.text


@pytest.mark.parametrize("value, verdict", [(0.25, 0.25), (True, 1.0), (7.0, None), (float("nan"), None)])
def test_a_graded_check_keeps_its_value_and_an_impossible_one_is_unknown(own_check, value, verdict):
    def graded(response: str) -> float:
        return value

    own_check("test:graded", graded)
    assert RuleGrader().grade([item("a", rule("test:graded"))]) == [[verdict]]


def test_null_and_nan_parameters_are_padding():
    padded = rule("rise:max_words", num_words=2.0, keywords=None, other=float("nan"))
    assert RuleGrader().grade([item("a b", padded), item("a b c", padded)]) == [[1.0], [0.0]]


@pytest.mark.parametrize(
    "tags, field, reason",
    [
        ({"function": "keywords:existance"}, "function", "keywords:existence"),
        ({"function": "nonsense"}, "function", "docs/rubrics.md"),
        ({}, "function", "found None"),
        ({"function": "rise:max_words"}, "parameters.num_words", "found nothing"),
        ({"function": "rise:max_words", "parameters": {"num_words": 2.5}}, "parameters.num_words", "2.5"),
        ({"function": "rise:max_words", "parameters": {"num_words": 0}}, "parameters.num_words", "greater than"),
        ({"function": "rise:max_words", "parameters": {"num_words": 2, "x": 1}}, "parameters.x", "takes num_words"),
        (
            {"function": "rise:max_words", "parameters": {"num_word": 2}},
            "parameters.num_word",
            "Unknown parameter; found 2",
        ),
        ({"function": "rise:max_words", "parameters": [1]}, "parameters", "expected an object"),
        ({"function": "keywords:existence", "parameters": {"keywords": []}}, "parameters.keywords", "at least 1"),
        ({"function": "keywords:existence", "parameters": {"keywords": ["a", 3]}}, "parameters.keywords.1", "string"),
        (
            {"function": "length_constraints:number_words", "parameters": {"num_words": 3, "relation": "about"}},
            "parameters.relation",
            "less than",
        ),
        (
            {"function": "language:response_language", "parameters": {"language": "xx"}},
            "parameters.language",
            "expected one",
        ),
    ],
)
def test_unknown_checks_and_unfit_parameters_are_errors_that_name_the_field(tags, field, reason):
    with pytest.raises(CheckError, match=reason) as error:
        validate(Criterion("a wish", 1.0, {"verifier": "rule", **tags}))
    assert error.value.field == field


def test_language_verdicts_repeat_and_leave_the_random_state_alone():
    french, short = rule("language:response_language", language="fr"), ["oui", "no", "hotel taxi", "le la", "radio"]
    state = random.getstate()
    first = RuleGrader().grade([item(text, french) for text in short])
    assert all(RuleGrader().grade([item(text, french) for text in short]) == first for _ in range(20))
    assert random.getstate() == state


class Recorder:
    """A grader that gives each criterion its weight's sign, and remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def grade(self, items):
        self.asked.append([(i.uid, [c.text for c in i.criteria]) for i in items])
        return [[0.5 if c.weight > 0 else None for c in i.criteria] for i in items]


def test_routing_sends_each_criterion_to_its_grader_and_keeps_the_order():
    judge = Recorder()
    water = rule("rise:contains_any", words=["water"])
    polite, untagged = Criterion("is polite", 1, {"verifier": "llm"}), Criterion("is kind", -1)
    items = [item("water", polite, water, untagged, uid="a"), item("no", water, uid="b"), item("x", untagged, uid="c")]
    assert RoutingGrader(RuleGrader(), judge).grade(items) == [[0.5, 1.0, None], [0.0], [None]]
    assert judge.asked == [[("a", ["is polite", "is kind"]), ("c", ["is kind"])]]
    assert RoutingGrader(RuleGrader(), judge).grade([]) == []


class HasRubric:
    uid = "a"

    def __init__(self, *criteria):
        self.rubric = Rubric(criteria)


def test_a_missing_judge_stops_a_run_at_its_start():
    rules, mixed = (
        HasRubric(rule("punctuation:no_comma")),
        HasRubric(rule("punctuation:no_comma"), Criterion("kind", 1)),
    )
    assert required_routes([rules]) == {"rule"}
    assert required_routes([rules, mixed]) == {"rule", "llm"}
    grader = RoutingGrader(RuleGrader())
    grader.require([rules])
    with pytest.raises(ValueError, match=r"^prompt 'a': the criterion 'kind' needs the llm grader, found only rule;"):
        grader.require([rules, mixed])
    with pytest.raises(ValueError, match="llm"):
        grader.grade([item("x", Criterion("kind", 1))])


def test_an_unknown_verifier_is_an_error():
    with pytest.raises(ValueError, match=r"verifier.*human"):
        route(Criterion("kind", 1, {"verifier": "human"}))


def test_band_scores_are_graded_verdicts():
    assert [band_verdict(s) for s in (1, 5.5, 10)] == [0.0, 0.5, 1.0]
    for score in (0, 10.5, float("nan")):
        with pytest.raises(ValueError, match="score"):
            band_verdict(score)
    assert bands(Criterion("kind", 1)) is None
    assert bands(Criterion("kind", 1, {"bands": {"1-2": "bad"}})) == {"1-2": "bad"}


def test_the_table_in_the_documentation_is_current():
    page = (Path(__file__).parents[2] / "docs" / "rubrics.md").read_text(encoding="utf-8")
    assert insert(page) == page, "run: python -m rise_rl.graders.checks docs/rubrics.md"
    assert all(f"`{name}`" in page for name in CHECKS)


def test_every_check_says_what_it_asks_and_when_it_is_met():
    for name, entry in CHECKS.items():
        assert entry.function.__doc__, name
        fields = {part.partition("}")[0] for part in entry.wish.split("{")[1:]}
        assert fields <= set(entry.parameters.model_fields), name
