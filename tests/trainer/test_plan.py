"""`rise-rl plan`: the table, the verdict, the advice and the messages; nothing is loaded."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rise_engine import memory_advice
from rise_engine.memory_plan import plan_memory
from rise_rl.config import load_config
from rise_rl.plan import plan_run, workload
from tests.trainer.test_cli import run

GIB = 2**30
EIGHT = "grpo.prompts_per_step=8"  # a prompt for each of eight ranks


def test_a_plan_names_what_is_held_and_says_that_it_fits(tiny_config):
    code, output = run("plan", tiny_config(), "rollout.engine=transformers")
    assert code == 0
    for word in ("parameters", "gradients", "optimizer", "activations", "head workspace", "KV cache", "fits: peak"):
        assert word in output
    assert "float32 logits of the same" in output


def test_what_does_not_fit_exits_with_1_and_advice(tiny_config):
    config = tiny_config()
    big = ("model=Qwen/Qwen3-4B", "rollout.max_new_tokens=8192", "data.max_prompt_tokens=4096", "engine.zero_stage=2")
    big += (EIGHT,)
    code, output = run("plan", config, *big, "--ranks", "8", "--device-memory", "40")
    assert code == 1
    assert "does NOT fit" in output
    assert "4.02 billion parameters, bfloat16, ZeRO 2, 8 rank(s), 40.00 GiB of GPU memory" in output
    assert "engine.activation_checkpointing=true: saves" in output


@pytest.mark.parametrize(
    "keys, ranks, gib, advised",
    [
        (
            ["model=Qwen/Qwen3-4B", "rollout.max_new_tokens=8192", "engine.zero_stage=2"],
            8,
            60,
            "engine.activation_checkpointing",
        ),
        (["model=Qwen/Qwen3-1.7B", "engine.dtype=float32", "engine.zero_stage=0"], 4, 24, "engine.zero_stage"),
        (["model=Qwen/Qwen3-1.7B", "engine.dtype=float32", "engine.zero_stage=0"], 1, 24, "engine.offload.optimizer"),
    ],
)
def test_advice_when_followed_gives_the_peak_that_was_promised(tiny_config, monkeypatch, keys, ranks, gib, advised):
    keys = [*keys, EIGHT, "rollout.engine=transformers"]
    changes = memory_advice._changes
    # Float32 stays: with bfloat16 advised first, no other stage would be.
    monkeypatch.setattr(memory_advice, "_changes", lambda *a: (c for c in changes(*a) if c[0] != "engine.dtype"))
    before = plan_run(load_config(tiny_config(), keys), ranks=ranks, device_gib=gib)
    assert not before.fits
    assert advised in [a.key for a in before.advice]
    made = re.findall(r"([\w.]+)=([\w.]+)", " ".join(f"{a.key}={a.value}" for a in before.advice))
    changed = load_config(tiny_config(), keys + [f"{key}={value}" for key, value in made])
    after = plan_run(changed, ranks=ranks, device_gib=gib)
    assert after.memory.peak == pytest.approx(before.advice[-1].peak)
    assert after.fits


GPUS = ("--ranks", "8", "--device-memory", "80")


@pytest.mark.parametrize("recipe", sorted(Path("recipes/paper").glob("*_*.yaml")), ids=lambda path: path.stem)
def test_the_papers_recipes_fit_the_gpus_they_are_for(recipe, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, output = run("plan", recipe, *GPUS)
    assert code == 0
    assert "fits: peak" in output
    assert "…" not in output  # every heading and name of the table is whole
    rows = int(re.search(r"room for (\d+) of 64 answers", output)[1])
    assert rows >= 8  # fewer would decode at a crawl


def test_a_share_too_small_for_vllm_does_not_fit_and_one_with_room_says_how_much_more_would(tiny_config):
    big = ["model=Qwen/Qwen3-14B", "rollout.max_new_tokens=8192", "data.max_prompt_tokens=4096", "engine.zero_stage=3"]
    big += ["engine.activation_checkpointing=true", "guidance.rollouts=8", EIGHT]
    code, output = run("plan", tiny_config(), *big, "rollout.vllm.memory_fraction=0.3", *GPUS)
    assert code == 1
    assert "vLLM will NOT start; peak" in output
    assert "no room for one answer of full length" in output
    assert "rollout.vllm.memory_fraction=0.45: peak" in output
    code, output = run("plan", tiny_config(), *big, "rollout.vllm.memory_fraction=0.45", *GPUS)
    assert code == 0
    found = re.search(r"rollout\.vllm\.memory_fraction=(\S+) would fit too, with room for (\d+)", output)
    code, output = run("plan", tiny_config(), *big, f"rollout.vllm.memory_fraction={found[1]}", *GPUS)
    assert code == 0
    assert f"room for {found[2]} of" in output
    assert "would fit too" not in output


def test_models_are_found_by_folder_by_file_and_by_published_name(tiny_config, tiny_folder, tmp_path):
    config = load_config(tiny_config())
    by_folder = plan_run(config).shape
    file = tmp_path / "other.json"
    file.write_text((tiny_folder / "config.json").read_text())
    assert plan_run(load_config(tiny_config(), ["model=Qwen/Qwen3-14B"]), model_config=file).shape == by_folder
    assert plan_run(load_config(tiny_config(), ["model=Qwen/Qwen3-14B"])).shape.layers == 40


@pytest.mark.parametrize(
    "model, message",
    [
        ("no-one/such-model", "no configuration of 'no-one/such-model' here or on the hub; give its config.json"),
        ("no/such/folder", "no model folder at no/such/folder"),
    ],
)
def test_a_model_that_is_not_there_is_an_error_that_says_what_to_do(tiny_config, monkeypatch, model, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable is read at import
    code, output = run("plan", tiny_config(), f"model={model}")
    assert code == 2
    assert message in output


def test_a_model_of_another_kind_is_refused(tiny_config, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "mamba"}))
    code, output = run("plan", tiny_config(), "--model-config", file)
    assert code == 2
    assert "--model-config: " in output
    assert "model_type: expected one of qwen3, qwen2, llama, mistral, found 'mamba'" in output


@pytest.mark.parametrize("name, message", [("t.yaml", "not a JSON file"), ("absent.json", "cannot be read (No such")])
def test_a_configuration_file_of_the_model_that_is_none_is_named_with_its_option(tiny_config, tmp_path, name, message):
    (tmp_path / "t.yaml").write_text("model: m\n")
    code, output = run("plan", tiny_config(), "--model-config", tmp_path / name)
    assert code == 2
    assert f"error: --model-config: {tmp_path / name}: {message}" in output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--ranks", "64"], "grpo.prompts_per_step: 2 prompts a step for 64 ranks"),
        (["rollout.max_new_tokens=100000"], "has a context of 512 tokens"),
        (["engine.zero_stage=3", "rollout.engine=transformers", "--ranks", "2"], "engine.zero_stage: 3 on 2 ranks"),
    ],
)
def test_what_train_refuses_is_not_planned(tiny_config, arguments, message):
    code, output = run("plan", tiny_config(), *arguments)
    assert code == 2
    assert message in output


def test_on_gpus_to_come_auto_is_vllm_which_samples_under_stage_3(tiny_config):
    config = load_config(tiny_config(), ["engine.zero_stage=3", "rollout.engine=auto"])
    assert plan_run(config, ranks=2, device_gib=80).setting.vllm is not None


def test_the_workload_is_the_longest_that_the_configuration_allows(tiny_config):
    keys = ["grpo.prompts_per_step=4", "grpo.group_size=6", "guidance.rollouts=3", "rollout.max_new_tokens=100"]
    keys += ["engine.micro_batch_tokens=2000", "rollout.max_rows=5", "data.max_prompt_tokens=50"]
    shape = plan_run(load_config(tiny_config(), keys)).shape
    work = workload(load_config(tiny_config(), keys), shape, 1)
    assert (work.prompt, work.response, work.group, work.rows, work.packed) == (50, 100, 9, 5, True)
    for attention, packed in (("sdpa", True), ("flash_attention_2", True), ("eager", False)):
        config = load_config(tiny_config(), [*keys, f"engine.attention={attention}"])
        assert workload(config, shape, 1).packed is packed
    assert work.several  # 4 prompts of 50 + 9 x 100 tokens
    assert not workload(load_config(tiny_config(), keys), shape, 4).several
    # One update of two prompts each: 1900 tokens.
    assert not workload(load_config(tiny_config(), [*keys, "grpo.mini_batch_prompts=2"]), shape, 1).several
    plain = workload(load_config(tiny_config(), [*keys, "guidance.enabled=false"]), shape, 1)
    assert (plain.group, plain.hint) == (6, 0)


def test_a_reference_is_planned_where_the_loss_has_a_kl_term(tiny_config):
    with_kl = plan_run(load_config(tiny_config(), ["grpo.kl_coef=0.1"]))
    assert with_kl.memory.phases["update"]["reference policy"] == 4 * with_kl.shape.parameters
    without = plan_memory(with_kl.shape, with_kl.work, replace(with_kl.setting, reference=False))
    assert "reference policy" not in without.phases["update"]
