"""The command line: what works, and what a person is told when it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rise_engine.checkpoint import CheckpointStore
from rise_rl.cli import app
from rise_rl.sft_config import SftConfig
from tests.run.synthetic import create
from tests.trainer.conftest import row


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    return result.exit_code, " ".join(result.output.split())


def replace_train(config: Path, rows: list[dict] | str) -> None:
    text = rows if isinstance(rows, str) else "".join(json.dumps(r) + "\n" for r in rows)
    (config.parent / "train.jsonl").write_text(text)


def test_dry_run_shows_the_resolved_configuration_and_makes_nothing(tiny_config):
    config = tiny_config()
    code, output = run("train", config, "guidance.gamma=0.3", "--dry-run")
    assert code == 0
    assert "gamma: 0.3" in output
    assert '"gradient_accumulation_steps": 1' in output
    assert not (config.parent / "runs").exists()


@pytest.mark.parametrize(
    "override, message",
    [
        ("guidance.gama=1", "guidance.gama: unknown key; did you mean 'gamma'?"),
        ("data.train=nowhere.jsonl", "nowhere.jsonl"),
        ("model=no/such/folder", "no/such/folder"),
        ("data.max_prompt_tokens=5", "tokens, more than data.max_prompt_tokens (5)"),
        ("rollout.max_new_tokens=100000", "has a context of 512 tokens"),
        ("grpo.prompts_per_step=7", "7 prompts a step, but the training data has only 6"),
        ("grader=no.such:thing", "grader"),
        ("trackers=[wandb]", "wandb"),
    ],
)
def test_mistakes_end_with_a_message_and_leave_no_run_behind(tiny_config, override, message):
    config = tiny_config()
    code, output = run("train", config, override)
    assert code == 2
    assert "error:" in output
    assert message in output
    assert not (config.parent / "runs" / "tiny").exists()


@pytest.mark.parametrize(
    "override, message",
    [
        ("grpo.prompts_per_step=7", "grpo.prompts_per_step: 7 prompts a step, but the training data has only 6"),
        ("judge.cache_dir=/dev/null/cache", "judge.cache_dir: cannot open a cache in /dev/null/cache"),
        ("data.heldout={folder}/train.jsonl", "data.heldout: 6 of 6 prompts are in data.train too, such as 'train-0'"),
        ("output=/dev/null/runs", "output: no run can be written in /dev/null/runs"),
        ("output={folder}/train.jsonl", "output: no run can be written in"),
        ("model=smollm2-135", "model: no model is called 'smollm2-135'; did you mean 'smollm2-135m'?"),
        ("model=owner/absent", "model: owner/absent is neither a local folder, nor a known name (smollm2-135m), nor"),
    ],
)
def test_what_can_be_known_is_said_before_a_model_is_loaded(tiny_config, monkeypatch, override, message):
    config = tiny_config()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("rise_rl.launch.PolicyEngine", lambda *_, **__: pytest.fail("a model was loaded"))
    code, output = run("train", config, override.format(folder=config.parent))
    assert code == 2
    assert output.startswith(f"error: {message}"), output
    assert not (config.parent / "runs" / "tiny").exists()


@pytest.mark.parametrize(
    "command, message",
    [
        (["sample", "{model}", " "], "prompt: expected some text, found none"),
        (["eval", "{config}", "--output", "/dev/null/x.json"], "--output: no file can be written in /dev/null"),
        (["eval", "{config}", "--output", "{folder}"], "--output: expected a file, found the folder"),
        (["compare", "{folder}", "{folder}", "--output", "{folder}"], "--output: expected a file, found the folder"),
        (
            ["grade", "{data}", "--rubrics", "{data}", "--output", "/dev/null/x.jsonl"],
            "--output: no file can be written in /dev/null",
        ),
        (["plan", "{config}", "--device-memory", "-1"], "Invalid value for '--device-memory'"),
        (["data", "check", "{data}", "--max-prompt-tokens", "-3"], "Invalid value for '--max-prompt-tokens'"),
        (["plateau", "{folder}"], "{folder}: not a run folder, it has no config.yaml"),
        (["report", "{folder}"], "{folder}: not a run folder, it has no config.yaml"),
        (["export", "{folder}", "{folder}/new"], "{folder}: not a run folder, it has no config.yaml"),
        (["plateau", "{sft}"], "{sft}: a run of `rise-rl sft`, which has no reward gap"),
    ],
)
def test_what_a_command_was_given_is_looked_at_first(tiny_config, tiny_folder, tmp_path, monkeypatch, command, message):
    config = tiny_config()
    config.rename(tmp_path / "tiny.yaml")  # a folder with a config.yaml would be a run's
    monkeypatch.setattr("rise_rl.inference.FrozenPolicy", lambda *_, **__: pytest.fail("a model was loaded"))
    sft = {"name": "s", "model": "m", "data": {"train": "train.jsonl"}}
    create(tmp_path / "sft", SftConfig.model_validate(sft))
    names = {
        **{"config": tmp_path / "tiny.yaml", "data": tmp_path / "train.jsonl", "folder": tmp_path},
        **{"sft": tmp_path / "sft", "model": tiny_folder},
    }
    code, output = run(*(part.format(**names) for part in command))
    assert code == 2
    assert message.format(**names) in output.replace("│ ", "").replace(" │", "")


@pytest.mark.parametrize(
    "bad, message",
    [
        ('{"prompt": [\n', "train.jsonl, row 1"),
        ([row("a", ["x"]), {**row("b", ["x"]), "prompt": []}], "train.jsonl, row 2, prompt"),
        ([{**row("a", ["x"]), "prompt": [{"role": "user", "content": "  "}]}], "train.jsonl, row 1, prompt[0]"),
        ([], "expected at least one row, found none"),
    ],
)
def test_bad_rows_are_named(tiny_config, bad, message):
    config = tiny_config()
    replace_train(config, bad)
    code, output = run("train", config)
    assert code == 2
    assert message in output


def test_a_criterion_that_nobody_can_judge_stops_the_run_at_once(tiny_config):
    config = tiny_config()
    example = row("a", ["x"])
    example["reward_model"]["rubrics"][0]["tags"] = {"verifier": "llm", "function": None, "parameters": None}
    replace_train(config, [example] * 2)
    code, output = run("train", config)
    assert code == 2
    assert "train.jsonl: prompt 'a': the criterion 'use the letter e' needs the llm grader" in output


def test_overlong_prompts_can_be_dropped_and_are_counted(tiny_config):
    config = tiny_config(steps=1, evaluation__every=0, checkpoint__every=0)
    long = row("long", ["words"] * 60)
    replace_train(config, [row("a", ["x"]), long, row("b", ["y"])])
    code, output = run("train", config, "data.overlong_prompt=drop")
    assert code == 0, output
    assert "dropped 1 of 3 prompts as too long" in output


def test_a_second_run_of_the_same_name_is_refused_and_resume_needs_a_run(tiny_config):
    config = tiny_config(steps=1, evaluation__every=0)
    assert run("train", config, "--resume")[0] == 2
    assert run("train", config)[0] == 0
    code, output = run("train", config)
    assert code == 2
    assert "--resume goes on with that run" in output


def test_full_disk_while_saving_keeps_what_was_saved(tiny_config, monkeypatch):
    config = tiny_config(steps=4, evaluation__every=0)
    original = CheckpointStore.save

    def full(self, policy):
        if policy.step == 4:
            monkeypatch.setattr(
                "torch.save", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left on device"))
            )
        return original(self, policy)

    monkeypatch.setattr(CheckpointStore, "save", full)
    code, output = run("train", config)
    assert code == 2
    assert "No space left on device" in output
    assert "step-00000002 is intact" in output
    assert [p.name for p in (config.parent / "runs/tiny/checkpoints").glob("*step*")] == ["step-00000002"]


def test_an_unreadable_checkpoint_is_named_and_nothing_is_lost(tiny_config):
    config = tiny_config(steps=2, evaluation__every=0)
    assert run("train", config)[0] == 0
    checkpoint = config.parent / "runs/tiny/checkpoints/step-00000002"
    state = next(checkpoint.glob("*.safetensors"))
    state.write_bytes(state.read_bytes()[:100])
    before = (config.parent / "runs/tiny/metrics.jsonl").read_bytes()
    code, output = run("train", config, "steps=4", "--resume")
    assert code == 2
    assert "has 100 bytes instead of" in output
    assert (config.parent / "runs/tiny/metrics.jsonl").read_bytes() == before


def test_a_finished_run_can_be_reported_exported_sampled_and_evaluated(tiny_config, tmp_path):
    config = tiny_config(steps=2)
    folder = config.parent / "runs" / "tiny"
    code, output = run("train", config)
    assert code == 0
    assert f"report: {folder / 'report.html'}" in output
    assert run("report", folder)[0] == 0
    assert "no plateau in 2 steps" in run("plateau", folder)[1]

    before = (folder / "config.yaml").read_bytes()
    code, output = run("train", config, "steps=1", "grpo.group_size=3", "--resume")
    assert code == 0
    for said in ("steps from 2 to 1", "grpo.group_size from 4 to 3", "no step left: 2 are done"):
        assert said in output
    assert (folder / "config.yaml").read_bytes() == before

    for name, flags in [("last", []), ("best", ["--best"])]:
        assert run("export", folder, tmp_path / name, *flags)[0] == 0
    assert run("export", folder, tmp_path / "last")[0] == 2  # never overwritten

    code, output = run("sample", tmp_path / "last", "Hello there", "--n", 2, "--max-new-tokens", 4)
    assert code == 0
    code, output = run("eval", config, "--model", tmp_path / "last", "--output", tmp_path / "record.json")
    assert code == 0, output
    final = json.loads((folder / "evals.jsonl").read_text().splitlines()[-1])
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["reward/mean"] == pytest.approx(final["reward/mean"])
    assert record["criteria"] == final["criteria"]


def test_data_check_says_what_is_there_and_what_is_wrong(tiny_config):
    config = tiny_config()
    code, output = run("data", "check", config.parent / "train.jsonl")
    assert code == 0
    assert "6 rows, 6 good, 0 bad" in output
    replace_train(config, [row("a", ["x"]), {**row("b", ["x"]), "prompt": []}])
    code, output = run("data", "check", config.parent / "train.jsonl")
    assert code == 1
    assert "1 bad" in output


def test_data_check_counts_no_tokens_without_a_model(tiny_config):
    code, output = run("data", "check", tiny_config().parent / "train.jsonl", "--max-prompt-tokens", 1)
    assert code == 2
    assert "--max-prompt-tokens: expected --model too" in output


def test_grade_writes_verdicts_beside_the_responses(tiny_config, tmp_path):
    config = tiny_config()
    responses = tmp_path / "responses.jsonl"
    responses.write_text(json.dumps({"uid": "train-0", "response": "tea, eat, a data set"}) + "\n")
    code, output = run(
        "grade", responses, "--rubrics", config.parent / "train.jsonl", "--output", tmp_path / "graded.jsonl"
    )
    assert code == 0, output
    graded = json.loads((tmp_path / "graded.jsonl").read_text())
    assert graded["verdicts"] == [1.0, 1.0, 1.0]
    assert graded["reward"] == 1.0
