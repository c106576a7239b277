"""Every IFEval family and every check of our own: a response that meets it, one that does not, and the boundary."""

from __future__ import annotations

import pytest

from rise_rl.graders.checks import CHECKS, find

LESS, LEAST = "less than", "at least"
CAPS = "THE WEATHER IS LOVELY TODAY AND WE ARE ALL GOING FOR A WALK IN THE PARK."
ENGLISH = "The weather is lovely today and we are all going for a walk in the park."
GERMAN = "Das Wetter ist heute schön und wir gehen alle zusammen im Park spazieren."

# (check, parameters, responses that meet it, responses that do not)
CASES = [
    ("keywords:frequency", {"keyword": "War", "relation": LEAST, "frequency": 1}, ["war"], ["peace"]),
    ("keywords:letter_frequency", {"letter": "T", "let_relation": LEAST, "let_frequency": 1}, ["t"], ["d"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, ["a***b ***\nc"], ["a *** *** b", " *** a *** "]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": " Go "},
        [" \n \n go on"],
        ["on go"],
    ),
    ("combination:repeat_prompt", {"prompt_to_repeat": " SAY it "}, ["say IT: no"], ["it say"]),
    ("startend:end_checker", {"end_phrase": ' "The End" '}, ['so it was. the end "'], ["the end, friend"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, ["---\n- a", "\n* a\n***"], ["---", "- - -\n- a"]),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 1},
        ["*a*", "**a**"],
        ["***a", "**", "****", "* *"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['\n``` {"a": [1]}```\n', "```JSON\n1\n```\n"],
        ["```json\n```", "``` x", "json 1"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": " Part ", "num_sections": 1},
        ["Part1"],
        ["Apart 1", "Part"],
    ),
    ("rise:numbered_list", {"min_items": 1}, ["\n  1. a"], ["1.a", "x 1. a", "1.\na"]),
    ("rise:bullet_list", {"min_items": 1}, ["\n  - a", "•a", "* **a**"], ["---", "***", "- - -", "-5", "-\na"]),
    ("keywords:existence", {"keywords": ["Yeast", "gluten"]}, ["yeasty GLUTEN"], ["yeast", "glute and yeast"]),
    ("keywords:existence", {"keywords": ["a+b"]}, ["is a+b"], ["aab"]),
    ("keywords:frequency", {"keyword": "war", "relation": LEAST, "frequency": 2}, ["War, war", "warwar"], ["war"]),
    ("keywords:frequency", {"keyword": "war", "relation": LESS, "frequency": 2}, ["war", "peace"], ["War. War."]),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, ["rocks roll"], ["Rock!", "a rock"]),
    ("keywords:letter_frequency", {"letter": "o", "let_relation": LEAST, "let_frequency": 2}, ["Oo", "foo"], ["of"]),
    ("keywords:letter_frequency", {"letter": "#", "let_relation": LESS, "let_frequency": 2}, ["#", "x"], ["##"]),
    ("language:response_language", {"language": "de"}, [GERMAN], [ENGLISH, "12345", "?!"]),
    (
        "change_case:english_capital",
        {},
        [CAPS, "DEAR SIR, PLEASE SEND ME THE BOOK"],
        [ENGLISH, GERMAN.upper(), "123", CAPS + "x"],
    ),
    ("change_case:english_lowercase", {}, [ENGLISH.lower()], [ENGLISH, GERMAN.lower(), "123"]),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": LEAST, "capital_frequency": 2},
        ["I am OK", "HI THERE"],
        ["Hi THERE", "ok"],
    ),
    ("change_case:capital_word_frequency", {"capital_relation": LESS, "capital_frequency": 1}, ["Hi"], ["I"]),
    ("punctuation:no_comma", {}, ["a. b; c"], ["a, b", "你好，世界"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": LESS}, ["one two", "1 2"], ["a b c", "don't go"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": LEAST}, ["a b c"], ["a b"]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": LEAST},
        ["One. Two.", "Really?! Yes", 'He said "no." Then he left.', "一。二。"],
        ["Dr. Smith pays 3.5 dollars.", "J. S. Bach", "1. One item", "e.g. this"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na\n***\nb\n***"],
        ["a", "a\n\nb", "a ****** b", "a *** b *** c"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Summary"},
        ["a\n\nsummary: b", 'a\n \n\n"Summary" b'],
        ["summary\n\nb", "a\n\nsummaries", "a\n\nsummary\n\nc", "summary"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[a] [b c]", "[a][b][c]"],
        ["[a]", "[a\nb] [c]"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["x\nP.S. y", "p. s. y"], ["ps y", "Up.S. x"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S y", "P. P. S. y"], ["P.S. y"]),
    ("detectable_format:constrained_response", {}, ["My answer is no."], ["no", "my answer is no", "My answer is"]),
    ("detectable_format:json_format", {}, ['{"a": 1}', "```json\n[1]\n```", "3"], ["{a: 1}", 'x {"a": 1}', "NaN", "{"]),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb", "SECTION 1 SECTION 2 SECTION 3"],
        ["SECTION 1", "Section 1 Section 2", "SECTION one SECTION two"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n- b", "  * a\n  * b"],
        ["* a", "* a\n* b\n* c", "**a**\n**b**", "- \n- a"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and **b c**", "*a* *b* *c*"],
        ["*a*", "* a\n* b", "** ** *a*", "*a\nb* *c*"],
    ),
    ("detectable_format:title", {}, ["<<Sun>> x", "x << a b >>"], ["<Sun>", "<< >>", "<<a\nb>>", "Sun"]),
    (
        "combination:two_responses",
        {},
        ["a ****** b", "******a******b******"],
        ["a", "a ****** a", "a ****** ", "a ****** b ****** c", "a ****** ****** b"],
    ),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, [" say hi. Hi!"], ["Hi! Say hi.", "Say"]),
    (
        "startend:end_checker",
        {"end_phrase": "Enjoy the smell."},
        ['x "Enjoy the smell."', "enjoy THE smell."],
        ["Enjoy the smell. Bye"],
    ),
    ("startend:quotation", {}, ['"a"', ' "a" '], ['"', '"a', "'a'", "a"]),
    ("rise:contains_any", {"words": ["rain", "wet day"]}, ["Rain!", "a wet\nday"], ["train", "rainy", "wet days"]),
    ("rise:contains_any", {"words": ["!", "["]}, ["wow!", "a[b"], ["wow."]),
    ("rise:contains_none", {"words": ["?", "I"]}, ["It is.", "II"], ["I am", "why?"]),
    ("rise:contains_text", {"text": "IMPORTANT"}, ["so IMPORTANT."], ["important", "Important"]),
    ("rise:starts_with", {"phrases": ["Hello", "**"]}, ["hello, x", ' "Hello!"', "**b"], ["Hellos", "Oh Hello", "*b"]),
    ("rise:max_words", {"num_words": 2}, ["a", "a b."], ["a b c"]),
    ("rise:bullet_list", {"min_items": 2}, ["* a\n- b", "• a\n• b\n• c"], ["* a", "**a**\n**b**", "a - b - c"]),
    ("rise:numbered_list", {"min_items": 2}, ["1. a\n2) b"], ["1. a", "1.5 a\n2.5 b", "2020 was\n2021 was"]),
]


@pytest.mark.parametrize("name, parameters, met, missed", CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_each_check_tells_responses_that_meet_it_from_others(name, parameters, met, missed):
    check = find(name)
    bound = check.bind(parameters)
    for response in met:
        assert check.function(response, **bound) is True, response
    for response in missed:
        assert check.function(response, **bound) is False, response


def test_every_family_is_tested():
    families = ("ifeval_words", "ifeval_structure", "own")
    named = {name for name, check in CHECKS.items() if check.function.__module__.rpartition(".")[2] in families}
    assert named == {case[0] for case in CASES}
    assert len(named) == 25 + 7
