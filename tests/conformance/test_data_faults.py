"""Data as publishers really write it loads, or is an error that names file, row and field."""

from __future__ import annotations

import json

import pytest

from rise_rl.data import DataError, load_examples

USER = {"role": "user", "content": "How do I sleep better?"}
TAGS = {"level": "example", "axis": "accuracy"}


def load(tmp_path, row):
    path = tmp_path / "data.jsonl"
    path.write_text((row if isinstance(row, str) else json.dumps(row)) + "\n", encoding="utf-8")
    return load_examples(path)[0]


def row(*items, prompt=(USER,), **more):
    return {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "reward_model": {"rubrics": list(items)},
        **more,
    }


def item(**fields):
    return {"criterion": "mentions light", "points": 5, **fields}


@pytest.mark.parametrize(
    "tags",
    [
        TAGS,
        {**TAGS, "cluster": None},
        ["level:example", "axis:accuracy"],
        json.dumps(TAGS),
        json.dumps(["level:example", "axis:accuracy"]),
        "level:example, axis:accuracy",
        [" level : example ", "axis:accuracy", " "],
    ],
)
def test_tags_as_object_list_or_text(tags, tmp_path):
    assert load(tmp_path, row(item(tags=tags))).rubric.criteria[0].tags == {**TAGS, "verifier": "llm"}


def test_tags_keep_colons_flags_and_repeated_keys(tmp_path):
    tags = ["cluster:a:b", "hedged", "physician:1", "physician:2", "physician:3"]
    found = load(tmp_path, row(item(tags=tags))).rubric.criteria[0].tags
    assert found == {"cluster": "a:b", "hedged": True, "physician": ["1", "2", "3"], "verifier": "llm"}


@pytest.mark.parametrize("tags", [None, {}, [], "", float("nan")])
def test_criteria_without_tags_go_to_the_judge(tags, tmp_path):
    assert load(tmp_path, row(item(tags=tags))).rubric.criteria[0].tags == {"verifier": "llm"}


@pytest.mark.parametrize("points, weight", [(8, 8.0), (7.5, 7.5), ("8", 8.0), (" 7.5 ", 7.5), ("-3", -3.0), (-3, -3.0)])
def test_points_as_int_float_or_text(points, weight, tmp_path):
    found = load(tmp_path, row(item(), item(points=points))).rubric.criteria[1]
    assert found.weight == weight
    assert type(found.weight) is float


@pytest.mark.parametrize(
    "word, weight",
    [
        ("critical", 1.0),
        ("Essential", 1.0),
        ("important", 0.7),
        ("nice_to_have", 0.3),
        (" Nice to have ", 0.3),
        ("optional", 0.3),
    ],
)
def test_importance_as_words(word, weight, tmp_path):
    found = load(
        tmp_path, row({"description": "mentions light", "importance": word, "title": "Light"})
    ).rubric.criteria[0]
    assert (found.text, found.weight, found.tags["title"]) == ("mentions light", weight, "Light")


def test_a_rubric_without_weights_counts_each_item_once(tmp_path):
    items = [{"criterion": "a"}, {"criterion": "b", "points": None}]
    assert [c.weight for c in load(tmp_path, row(*items)).rubric.criteria] == [1.0, 1.0]


def banded(**changes):
    bands = {f"{low}-{low + 1}": f"level {low}" for low in (1, 3, 5, 7, 9)}
    entry = {"name": "Accuracy", "criteria_description": "Is it true?", **bands, **changes}
    return {"query": "Write a plan.", "index": 4, "domain1": "Education", "checklist": [entry, entry]}


def test_banded_items_keep_their_bands_for_the_judge(tmp_path):
    example = load(tmp_path, banded())
    assert (example.uid, example.domain, example.messages[0]["content"]) == ("4", "Education", "Write a plan.")
    assert [c.weight for c in example.rubric.criteria] == [1.0, 1.0]
    tags = example.rubric.criteria[0].tags
    assert list(tags["bands"].values()) == ["level 1", "level 3", "level 5", "level 7", "level 9"]
    assert tags["verifier"] == "llm"


def dimensions(**weights):
    criterions = {
        "depth": [
            {"criterion": "a", "explanation": "why", "weight": 0.25},
            {"criterion": "b", "explanation": " ", "weight": "0.75"},
        ]
    }
    return {"prompt": "Explain.", "id": 9, "dimension_weight": weights, "criterions": criterions}


def test_nested_dimension_weights_multiply(tmp_path):
    found = load(tmp_path, dimensions(depth=0.4)).rubric.criteria
    assert [c.text for c in found] == ["a: why", "b"]
    assert [c.weight for c in found] == pytest.approx([0.1, 0.3])
    assert found[0].tags["dimension"] == "depth"


def instructions(*kwargs):
    names = ["length_constraints:number_words", "punctuation:no_comma"][: len(kwargs)]
    return {"key": 1000, "prompt": "Write.", "instruction_id_list": names, "kwargs": list(kwargs)}


@pytest.mark.parametrize("padding", [None, float("nan")])
def test_null_padded_kwargs(padding, tmp_path):
    example = load(
        tmp_path, instructions({"num_words": 9.0, "relation": "less than", "keywords": padding}, {"N": padding})
    )
    assert example.uid == "1000"
    assert [c.text for c in example.rubric.criteria] == ["answer with less than 9 words", "do not use any commas"]
    first, second = (c.tags for c in example.rubric.criteria)
    assert first["parameters"] == {"num_words": 9.0, "relation": "less than"}
    assert second == {"verifier": "rule", "function": "punctuation:no_comma", "parameters": {}}


def test_an_instruction_that_no_program_can_check_goes_to_the_judge(tmp_path):
    found = load(tmp_path, {"prompt": "Go.", "instruction_id_list": ["words:start_verb"], "kwargs": [{"N": None}]})
    assert [(c.text, c.tags["verifier"]) for c in found.rubric.criteria] == [("start with a verb", "llm")]


def test_literal_nan_as_padding_is_dropped(tmp_path):
    text = (
        '{"prompt": "Sleep?", "score": NaN, "rubrics": [{"criterion": "a", "points": 1, "tags": {"verifier": "rule", '
        '"function": "rise:max_words", "parameters": {"num_words": 5, "keywords": NaN}}}]}'
    )
    example = load(tmp_path, text)
    assert example.rubric.criteria[0].tags["parameters"] == {"num_words": 5}
    assert "score" not in example.meta


def test_json_inside_json(tmp_path):
    plain = row(item(tags=TAGS), item(points=-1))
    inside = {"prompt": json.dumps(plain["prompt"]), "reward_model": json.dumps(plain["reward_model"])}
    deeper = {
        **plain,
        "reward_model": {"rubrics": json.dumps([json.dumps(i) for i in plain["reward_model"]["rubrics"]])},
    }
    assert load(tmp_path, inside) == load(tmp_path, deeper) == load(tmp_path, plain)
    kwargs = {**instructions({}), "instruction_id_list": '["punctuation:no_comma"]', "kwargs": '["{}"]'}
    assert load(tmp_path, kwargs).rubric.criteria[0].tags["function"] == "punctuation:no_comma"


@pytest.mark.parametrize("prompt", ['["a", "b"] is JSON?', '["a", "b"]', '{"role": 1}', "[not JSON"])
def test_a_prompt_that_looks_like_json_stays_text(prompt, tmp_path):
    assert load(tmp_path, row(item(), prompt=prompt)).messages == ({"role": "user", "content": prompt},)


def test_the_last_message_need_not_be_the_users(tmp_path):
    chat = [{"role": "system", "content": ""}, USER, {"role": "assistant", "content": "Well,"}]
    assert load(tmp_path, row(item(), prompt=chat)).messages == tuple(chat)


def test_a_canary_is_just_another_field(tmp_path):
    assert load(tmp_path, row(item(), canary="do not train on this")).meta["canary"] == "do not train on this"


RULE = {"verifier": "rule", "function": "rise:max_words", "parameters": {"num_words": 5}}
BAD = [
    (row(item(points="many")), "reward_model.rubrics[0].points", "expected a finite number, found 'many'"),
    (row(item(points=True)), "reward_model.rubrics[0].points", "expected a finite number, found True"),
    (row(item(points=float("nan"))), "reward_model.rubrics[0].points", "expected a finite number, found nan"),
    (row(item(points=float("inf"))), "reward_model.rubrics[0].points", "found inf"),
    (row(item(), {"criterion": "a"}), "reward_model.rubrics[1].points", "expected a weight, as other items"),
    (row(item(points=-1)), "reward_model.rubrics", "positive weight"),
    (row({"description": "a", "importance": "huge"}), "reward_model.rubrics[0].importance", "expected one of critical"),
    (row({"points": 1}), "reward_model.rubrics[0].criterion", "non-empty text, found None"),
    (row(item(criterion=" ")), "reward_model.rubrics[0].criterion", "non-empty text"),
    (row("mentions light"), "reward_model.rubrics[0]", "expected an object, found 'mentions light'"),
    (row(), "reward_model.rubrics", "non-empty list, found []"),
    ({"prompt": "a", "rubrics": "none"}, "rubrics", "non-empty list, found 'none'"),
    (row(item(tags=3)), "reward_model.rubrics[0].tags", "found 3"),
    (row(item(tags={"verifier": "human"})), "reward_model.rubrics[0].tags.verifier", "expected one of rule, llm"),
    (row(item(tags={**RULE, "function": "rise:max_word"})), "reward_model.rubrics[0].tags.function", "rise:max_words"),
    (row(item(tags={**RULE, "parameters": {}})), "reward_model.rubrics[0].tags.parameters.num_words", "found nothing"),
    (row(item(tags={**RULE, "parameters": "five"})), "reward_model.rubrics[0].tags.parameters", "expected an object"),
    (row(item(), prompt=[]), "prompt", "non-empty list"),
    (row(item(), prompt=" "), "prompt", "non-empty text"),
    ({"rubrics": [item()]}, "prompt", "found None"),
    (
        row(item(), prompt=[{"role": "assistant", "content": "Hi"}]),
        "prompt",
        "expected at least one message from the user",
    ),
    (
        row(item(), prompt=[{"role": "human", "content": "Hi"}]),
        "prompt[0].role",
        "expected one of system, user, assistant",
    ),
    (row(item(), prompt=[USER, {"role": "user", "content": " "}]), "prompt[1].content", "expected text, found ' '"),
    (row(item(), prompt=[USER, {"role": "user", "content": None}]), "prompt[1].content", "expected text, found None"),
    (row(item(), prompt=[{"role": "user", "content": [{"type": "text"}]}]), "prompt[0].content", "expected text"),
    (banded(**{"5-6": None}), "checklist[0].5-6", "non-empty text, found None"),
    (dimensions(), "dimension_weight.depth", "found none"),
    (dimensions(depth="high"), "dimension_weight.depth", "finite number, found 'high'"),
    (instructions({"relation": "less than"}), "kwargs[0].num_words", "found nothing"),
    (instructions({"num_words": 9, "relation": "less than"}, {"n": 1}), "kwargs[1].n", "found 1"),
    ({**instructions({}), "instruction_id_list": ["a:b"]}, "instruction_id_list[0]", "unknown check 'a:b'"),
    ({**instructions({}), "kwargs": [{}, {}]}, "kwargs", "one entry for each of 1 instructions, found 2"),
]


@pytest.mark.parametrize("bad, field, reason", BAD, ids=[f"{i}-{case[1]}" for i, case in enumerate(BAD)])
def test_what_cannot_be_used_is_an_error_that_names_file_row_and_field(bad, field, reason, tmp_path):
    with pytest.raises(DataError) as error:
        load(tmp_path, bad)
    assert (error.value.file, error.value.row, error.value.field) == (str(tmp_path / "data.jsonl"), 1, field)
    assert reason in error.value.message
