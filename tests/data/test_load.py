"""Files and the hub become examples; ids are stable and unique; errors say where the fault is."""

from __future__ import annotations

import csv
import hashlib
import json

import pytest

from rise_rl.data import DataError, data_hash, data_report, load_examples

ROW = {
    "prompt": [{"role": "user", "content": "How do I sleep better?"}],
    "ability": "Medical",
    "reward_model": {
        "style": "rubric",
        "rubrics": [
            {"criterion": "mentions light", "points": 5, "tags": {"verifier": "llm"}},
            {
                "criterion": "is short",
                "points": -2,
                "tags": {"verifier": "rule", "function": "rise:max_words", "parameters": {"num_words": 40, "x": None}},
            },
        ],
    },
    "extra_info": {"index": 3},
}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def another(prompt="Why is it dark?", **changes):
    return {**ROW, "prompt": prompt, **changes}


def as_parquet(path, rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def as_csv(path, rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(
            {k: json.dumps(v) if isinstance(v, (dict, list)) else v for k, v in row.items()} for row in rows
        )


WRITERS = {
    "rows.jsonl": lambda path, rows: write(path, *rows),
    "rows.json": lambda path, rows: path.write_text(json.dumps(rows), encoding="utf-8"),
    "lines.json": lambda path, rows: write(path, *rows),
    "rows.parquet": as_parquet,
    "rows.csv": as_csv,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_examples(name, tmp_path):
    rows = [ROW, another([{"role": "user", "content": 'Say "hi",\nplease — ☂'}])]
    WRITERS[name](tmp_path / name, rows)
    found = load_examples(tmp_path / name)
    assert found == load_examples(write(tmp_path / "reference.jsonl", *rows))
    first, second = found
    assert first.messages == ({"role": "user", "content": "How do I sleep better?"},)
    assert second.messages[0]["content"] == 'Say "hi",\nplease — ☂'
    assert (first.domain, first.meta) == ("Medical", {"ability": "Medical", "index": 3, "format": "rubrics"})
    assert [(c.text, c.weight) for c in first.rubric.criteria] == [("mentions light", 5.0), ("is short", -2.0)]
    assert first.rubric.criteria[1].tags["parameters"] == {"num_words": 40}


def test_a_hub_data_set_loads_through_datasets(tmp_path, monkeypatch):
    (tmp_path / "owner" / "rubrics").mkdir(parents=True)
    write(tmp_path / "owner" / "rubrics" / "train.jsonl", ROW, another())
    write(tmp_path / "owner" / "rubrics" / "test.jsonl", another("Why is it cold?"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert load_examples("owner/rubrics") == load_examples("owner/rubrics/train.jsonl")
    assert [e.messages[0]["content"] for e in load_examples("owner/rubrics:test")] == ["Why is it cold?"]
    assert data_hash("owner/rubrics") == data_hash("owner/rubrics:train") != data_hash("owner/rubrics:test")
    with pytest.raises(DataError, match=r"owner/rubrics:validation: .*hub gave"):
        load_examples("owner/rubrics:validation")


def test_uids_come_from_the_row_or_its_content(tmp_path):
    rows = [
        another(id=7, uid=" "),
        another(extra_info={"healthbench_prompt_id": "abc"}),
        another(),
        another("Why is it light?"),
        another(ability="Science"),
    ]
    uids = [e.uid for e in load_examples(write(tmp_path / "a.jsonl", *rows))]
    assert uids[:2] == ["7", "abc"]
    assert uids[4] == f"{uids[2]}#2"
    assert len(set(uids)) == 5
    assert all(len(uid) == 16 for uid in uids[2:4])
    alone = load_examples(write(tmp_path / "b.jsonl", rows[3]))[0]
    assert alone.uid == uids[3], "an id does not depend on the rows around it"


def test_the_content_id_depends_on_the_rubric_too(tmp_path):
    rubrics = [{"criterion": "other", "points": 5}]
    rows = [another(), another(reward_model={"rubrics": rubrics})]
    first, second = load_examples(write(tmp_path / "a.jsonl", *rows))
    assert first.uid != second.uid


def test_repeated_ids_are_prompts_of_their_own_and_counted(tmp_path):
    path = write(tmp_path / "a.jsonl", *[another(id="a")] * 3, another(id="a#2"), another(id="b"))
    assert [e.uid for e in load_examples(path)] == ["a", "a#2", "a#3", "a#2#2", "b"]
    assert data_report(path).repeated == 3
    assert data_report(write(tmp_path / "b.jsonl", another(id="a#2"))).repeated == 0


def test_an_error_names_file_row_and_field(tmp_path):
    bad = json.loads(json.dumps(ROW))
    bad["reward_model"]["rubrics"][1]["points"] = "many"
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps(ROW), "", json.dumps(bad)]), encoding="utf-8")
    with pytest.raises(DataError) as error:
        load_examples(path)
    assert (error.value.file, error.value.row, error.value.field) == (str(path), 3, "reward_model.rubrics[1].points")
    assert str(error.value) == f"{path}, row 3, reward_model.rubrics[1].points: expected a finite number, found 'many'"


@pytest.mark.parametrize(
    "name, content, place, reason",
    [
        ("a.jsonl", b'{"prompt": 1\r\n{}', "row 1", "expected JSON, found an error at column 13: Expecting ','"),
        ("a.jsonl", '{"prompt": "Caf\u00e9"}'.encode("latin-1"), "row 1", "UTF-8 text, found byte 0xe9 after .*Caf'"),
        ("a.csv", "prompt,rubrics\nCaf\u00e9,a\n".encode("latin-1"), "row 1", "UTF-8 text, found byte 0xe9"),
        ("a.jsonl", b"[1]", "row 1", "expected an object"),
        ("a.jsonl", b'{"text": "hi"}', "row 1", "known format"),
        ("a.jsonl", b"\xff\xfe{", "a.jsonl", "UTF-8"),
        ("a.jsonl", b"\n", "a.jsonl", "at least one row"),
        ("a.json", b"[{]", "a.json", "expected JSON"),
        ("a.json", b'["\xff"]', "a.json", "UTF-8 text, found byte 0xff"),
        ("a.parquet", b"PAR0", "a.parquet", "expected a parquet file"),
        ("a.csv", b"prompt,rubrics\na,b,c\n", "row 1", "expected 2 cells, found 3"),
        ("a.txt", b"hi", "a.txt", "ending in .jsonl"),
        ("absent.jsonl", None, "absent.jsonl", "no such file"),
    ],
)
def test_files_that_cannot_be_read_say_why(name, content, place, reason, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{place}.*{reason}"):
        load_examples(tmp_path / name)


def test_a_bad_byte_costs_its_own_row_only(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([json.dumps(ROW).encode(), b'{"prompt": "\xe9"}', json.dumps(another()).encode()]))
    report = data_report(path)
    assert (report.rows, [error.row for error in report.bad]) == (3, [2])


HALF = "smile \ud83d"


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"prompt": HALF}, "prompt"),
        ({"prompt": [{"role": "user", "content": HALF}]}, "prompt[0].content"),
        ({"prompt": json.dumps([{"role": "user", "content": HALF}])}, "prompt[0].content"),
        ({"id": HALF}, "id"),
        ({"reward_model": {"rubrics": [{"criterion": HALF, "points": 1}]}}, "reward_model.rubrics[0].criterion"),
        (
            {"reward_model": {"rubrics": [{"criterion": "a", "points": 1, "tags": {"topic": HALF}}]}},
            "reward_model.rubrics[0].tags.topic",
        ),
    ],
)
def test_text_that_no_tokenizer_takes_is_a_bad_row(changes, field, tmp_path):
    [error] = data_report(write(tmp_path / "a.jsonl", another(**changes))).bad
    assert error.field == field
    assert "half of a surrogate pair in 'smile \\ud83d'" in str(error)


def test_a_whole_surrogate_pair_is_one_character(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(another("smile \U0001f600"), ensure_ascii=True))
    assert "\\ud83d" in path.read_text()
    assert load_examples(path)[0].messages[0]["content"] == "smile \U0001f600"


def test_a_source_that_is_neither_file_nor_hub_id_is_an_error():
    with pytest.raises(DataError, match="no such file, and no hub id"):
        load_examples("some words")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(name, tmp_path):
    WRITERS[name](tmp_path / name, [ROW])
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    assert len(load_examples(tmp_path / name)) == 1


@pytest.mark.parametrize("name", WRITERS)
def test_rows_count_from_one_in_every_kind_of_file(name, tmp_path):
    WRITERS[name](tmp_path / name, [another(), another(" ")])
    assert [(e.row, e.field) for e in data_report(tmp_path / name).bad] == [(2, "prompt")]


def test_the_report_counts_what_is_there_and_lists_every_bad_row(tmp_path):
    long = another([{"role": "user", "content": "x" * 90}, {"role": "assistant", "content": "y"}], id="long")
    path = write(
        tmp_path / "a.jsonl", ROW, {"prompt": 1}, long, another(prompt=None), {"prompt": 2}, {"prompt": 2}, ROW
    )
    report = data_report(
        path, count_tokens=lambda messages: sum(len(m["content"]) for m in messages) // 2, max_prompt_tokens=40
    )
    assert (report.rows, [error.row for error in report.bad]) == (7, [2, 4, 5, 6])
    assert report.weights == [5.0, -2.0] * 3
    assert report.negative_share == 0.5
    assert (report.routes, report.checks) == ({"llm": 3, "rule": 3}, {"rise:max_words": 3})
    assert (report.repeated, report.not_ending_with_user) == (1, 1)
    assert [(p.uid, p.characters, p.tokens) for p in report.prompts[:1]] == [("long", 91, 45)]
    assert [p.uid for p in report.too_long] == ["long"]
    text = report.text()
    for line in (
        f"{path}: 7 rows, 3 good, 4 bad",
        "criteria: 6 (2.0 a row); weights -2 to 5, median 1.5, 50% negative",
        "longest prompt: 91 characters, 45 tokens (long)",
        "prompts over 40 tokens: 1, such as long (45)",
        "bad row 4: prompt: expected text or a non-empty list of messages, found None",
    ):
        assert line in text.splitlines()
    assert "bad rows 2, 5-6: expected a row of a known format" in text


def test_a_report_of_bad_rows_only_is_a_report(tmp_path):
    assert "1 rows, 0 good, 1 bad" in data_report(write(tmp_path / "a.jsonl", {"x": 1})).text()


def test_the_hash_is_of_the_bytes(tmp_path):
    path = write(tmp_path / "a.jsonl", ROW)
    assert data_hash(str(path)) == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "fields, domain", [({"ability": "A", "data_source": "D"}, "A"), ({"data_source": "D"}, "D"), ({}, "")]
)
def test_the_domain_is_what_the_row_says_it_is_about(fields, domain, tmp_path):
    row = {"prompt": "Why?", "rubrics": [{"criterion": "a", "points": 1}], **fields}
    assert load_examples(write(tmp_path / "a.jsonl", row))[0].domain == domain
