"""The quickstart's own data: complete, reproducible, within reach, and held-out prompts that are no copies."""

from __future__ import annotations

import importlib.util
import re
from collections import defaultdict
from pathlib import Path

import pytest

from rise_rl.data import load_examples
from rise_rl.graders import GradeItem, RuleGrader, required_routes

QUICKSTART = Path(__file__).parents[2] / "data" / "quickstart"


@pytest.fixture(scope="module")
def splits():
    return {name: load_examples(QUICKSTART / f"{name}.jsonl") for name in ("train", "heldout")}


def prompt(example):
    return example.messages[-1]["content"]


def by_topic(examples):
    topics = defaultdict(list)
    for example in examples:
        topics[example.domain].append(example)
    return topics


def test_the_files_are_what_the_generator_writes():
    spec = importlib.util.spec_from_file_location("make_quickstart", QUICKSTART / "make.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    for split in make.SPLITS:
        assert (QUICKSTART / f"{split}.jsonl").read_text(encoding="utf-8") == make.render(split)


def test_there_are_enough_prompts_in_the_same_topics(splits):
    assert len(splits["train"]) >= 240
    assert len(splits["heldout"]) >= 60
    train, heldout = (by_topic(splits[name]) for name in ("train", "heldout"))
    assert set(train) == set(heldout)
    assert 6 <= len(train) <= 10
    assert len({e.domain for e in splits["train"][: len(train)]}) == len(train), "the first rows hold every topic"


def test_a_topic_has_one_rubric_that_a_program_checks(splits):
    everything = [*splits["train"], *splits["heldout"]]
    assert required_routes(everything) == {"rule"}
    for examples in by_topic(everything).values():
        criteria = examples[0].rubric.criteria
        assert all(e.rubric.criteria == criteria for e in examples)
        assert 4 <= len(criteria) <= 8
        assert len({c.weight for c in criteria}) >= 3


def test_prompts_are_short_and_no_two_are_alike(splits):
    everything = [prompt(e) for e in (*splits["train"], *splits["heldout"])]
    assert all(len(text.split()) <= 15 for text in everything)
    assert len({" ".join(re.findall(r"\w+", text.lower())) for text in everything}) == len(everything)


# Words that carry a prompt's form, not its matter.
FORM = set(
    re.findall(
        r"\w+",
        """a about after an and any ask at be can do does for from get give good have how i in is it know like make me
        my of on or our please should some story tale tell that the there this to us we what when where which who why
        with would write you your first idea ideas recipe invent short takes place""",
    )
)


def test_held_out_prompts_are_no_near_copies(splits):
    def matter(text):
        return set(re.findall(r"\w+", text.lower())) - FORM

    train = [(prompt(e), matter(prompt(e))) for e in splits["train"]]
    for example in splits["heldout"]:
        mine = matter(prompt(example))
        for text, other in train:
            assert len(mine & other) / len(mine | other) < 0.5, (prompt(example), text)


# What somebody who was told the wishes might write, in about forty tokens.
GOOD = {
    "health": "Hello, you should drink water, rest and see a doctor if it stays.",
    "story": "Once upon a time there was Anna. She walked her dog in the rain.",
    "travel": "Welcome. You can take the train; food is part of a small budget.",
    "recipe": "First, wash your hands.\n1. Mix flour, water and salt in a bowl.",
    "message": "Hello, I would be happy if we met on Friday. Thank you.",
    "science": "In short: energy is IMPORTANT, for example when light meets the air outside.",
    "home": "Remember the cost.\n- Ask your family or a friend before you buy it.",
    "study": "Good luck. Make a plan, drink water and take a break when you need one.",
}


def test_every_topic_can_be_fulfilled_in_a_short_answer(splits):
    for topic, (example, *_) in by_topic(splits["train"]).items():
        verdicts = RuleGrader().grade([GradeItem(example.uid, example.messages, GOOD[topic], example.rubric.criteria)])[
            0
        ]
        assert example.rubric.reward(verdicts) == 1.0, topic
        assert len(GOOD[topic].split()) <= 25


BAD = {
    "health": "I am sorry to hear that",
    "story": "**The Kite**",
    "travel": "Great!",
    "recipe": "Here's how",
    "message": "Dear [Name]",
    "study": "Sure!",
}


RECITED = "talking about the request or yourself"


def negative_verdicts(example, response):
    grade = RuleGrader().grade([GradeItem("u", example.messages, response, example.rubric.criteria)])[0]
    return {c.text: v for c, v in zip(example.rubric.criteria, grade) if c.weight < 0}


def test_things_to_avoid_take_reward_away(splits):
    for topic, (example, *_) in by_topic(splits["train"]).items():
        avoided = {c.text for c in example.rubric.criteria if c.weight < 0}
        assert RECITED in avoided
        assert len(avoided) == (2 if topic in BAD else 1)
        if topic in BAD:
            assert negative_verdicts(example, BAD[topic]) == {t: float(t != RECITED) for t in avoided}
        recited = "In your answer, pay attention to the following: be brief"
        assert negative_verdicts(example, recited)[RECITED] == 1.0
