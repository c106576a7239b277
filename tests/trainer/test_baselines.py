"""The defining property of each baseline, by the keys of its recipe on the tiny model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import rise_rl.config
import rise_rl.inference
import rise_rl.trainer
from rise_engine.prompts import render_prompt
from rise_engine.rollout.transformers import TransformersRollout
from rise_rl.config import ConfigError
from rise_rl.data import load_examples
from rise_rl.scaffold import shown_count, strength
from tests.tiny import tiny_tokenizer
from tests.trainer.test_trainer import records, run

RECIPES = Path(__file__).parents[2] / "recipes/baselines"


def keys_of(recipe: str, **smaller) -> list[str]:
    """What a recipe says beyond its base, as overrides; `smaller` replaces values that need a large batch."""
    values = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())
    flat = {f"{a}.{b}": v for a, section in values.items() if isinstance(section, dict) for b, v in section.items()}
    flat |= {key.replace("__", "."): value for key, value in smaller.items()}
    return [f"{key}={yaml.safe_dump(value).splitlines()[0]}" for key, value in flat.items()]


@pytest.fixture
def learnt(monkeypatch):
    """The mini-batches of every step, as they are learnt from."""
    seen = []
    update = rise_rl.trainer.update

    def spy(policy, mini_batches, **keywords):
        seen.append(mini_batches)
        return update(policy, mini_batches, **keywords)

    monkeypatch.setattr(rise_rl.trainer, "update", spy)
    return seen


def test_rubric_rl_has_no_guidance_of_any_kind(tiny_config, learnt):
    config = tiny_config(steps=2, evaluation__every=0, checkpoint__every=0)
    metrics, folder = run(config, *keys_of("rubric_rl"))
    for step, m in enumerate(metrics, 1):
        assert (m["guided/generated"], m["lambda"], m["loss/guide"], m["guidance/active"]) == (0, 0.0, 0.0, False)
        assert all(r["kind"] == "natural" and not r["shown"] for r in records(folder, step))
    assert not any(s.is_guide for step in learnt for batch in step for s in batch)


def test_luffys_shaping_maximizes_the_support_itself(tiny_config):
    config = tiny_config(steps=1, evaluation__every=0, checkpoint__every=0)
    [rise], first = run(config, "name=rise")
    [luffy], second = run(config, "name=luffy", *keys_of("luffy_shaping"))
    assert records(first, 1) == records(second, 1)  # the same answers, filter and weights
    assert luffy["loss/policy"] == rise["loss/policy"]
    assert luffy["rho/mean"] == rise["rho/mean"]
    assert luffy["loss/guide"] < 0 < rise["loss/guide"]


def test_ruscarl_scaffolds_the_group_and_learns_under_the_bare_prompt(tiny_config, learnt):
    config = tiny_config(steps=2, evaluation__every=0, checkpoint__every=0)
    metrics, folder = run(config, *keys_of("ruscarl", grpo__mini_batch_prompts=1, scaffold__budget_tokens=256))
    answers = [records(folder, step) for step in (1, 2)]
    for step, found in enumerate(answers, 1):
        level = strength(step, 2, steepness=125, midpoint=0.2)
        assert [len(r["shown"]) for r in found] == [shown_count(3, level, i, 4) for _ in range(2) for i in range(4)]
        assert {r["kind"] for r in found} == {"natural"}
        assert all(len(set(r["shown"])) == len(r["shown"]) for r in found)
    assert [len(r["shown"]) for r in answers[0][:4]] == [3, 2, 1, 0]
    assert metrics[0]["scaffold/shown_mean"] == 1.5
    assert metrics[1]["scaffold/shown_mean"] == 0.0

    tokenizer = tiny_tokenizer()
    bare = {e.uid: render_prompt(tokenizer, e.messages) for e in load_examples(config.parent / "train.jsonl")}
    for step, mini_batches in enumerate(learnt):
        assert [len(batch) for batch in mini_batches] == [4, 4]
        for r, s in zip(answers[step], [s for batch in mini_batches for s in batch], strict=True):
            assert s.prompt_ids == bare[s.uid]
            assert (s.behaviour_logprob is None) == bool(r["shown"])  # sampled under another prompt
        for batch in mini_batches:  # one mean for the whole group, scaffolded or not
            assert sum(s.advantage for s in batch) == pytest.approx(0.0, abs=1e-9)
    assert metrics[1]["kl"] > 0
    assert metrics[1]["ratio/max"] != 1.0
    assert [m["lr"] for m in metrics] == [0.001, 0.001]


def test_held_out_answers_are_sampled_from_the_whole_distribution_whatever_the_method(tiny_config, monkeypatch):
    used = []
    generate = TransformersRollout.generate

    def spy(self, requests, sampling, *rest):
        used.append((requests[0].uid.split("-")[0], sampling.top_p, sampling.top_k, sampling.temperature))
        return generate(self, requests, sampling, *rest)

    monkeypatch.setattr(TransformersRollout, "generate", spy)
    config = tiny_config(steps=2, evaluation__every=2, checkpoint__every=0)
    run(
        config,
        *keys_of("ruscarl", grpo__mini_batch_prompts=1, scaffold__budget_tokens=256),
        "rollout.engine=transformers",
    )
    assert ("train", 0.8, 20, 0.7) in used
    assert {u[1:] for u in used if u[0] == "heldout"} == {(1.0, 0, 1.0)}
    used.clear()
    other = rise_rl.config.load_config(config, ["rollout.temperature=0.7", "evaluation.temperature=0.6"])
    rise_rl.inference.evaluate_model(other, Console(quiet=True))
    assert {u for u in used if u[0] != "parity"} == {("heldout", 1.0, 0, 0.6)}


def test_a_scaffold_that_does_not_fit_loses_what_was_drawn_last(tiny_config):
    config = tiny_config(steps=2, evaluation__every=0, checkpoint__every=0)
    metrics, folder = run(config, *keys_of("ruscarl", grpo__mini_batch_prompts=1, scaffold__budget_tokens=60))
    shown = [len(r["shown"]) for r in records(folder, 1)[:4]]
    assert metrics[0]["scaffold/dropped_criteria"] > 0
    assert max(shown) < 3
    assert shown[-1] == 0


NO_SYSTEM = {
    "refuses": "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}",
    "leaves out": "{% if messages[0]['role'] == 'system' %}{% set messages = messages[1:] %}{% endif %}",
}


@pytest.mark.parametrize("kind", NO_SYSTEM)
def test_a_model_without_a_system_role_is_refused_before_the_first_step(tiny_config, tiny_folder, tmp_path, kind):
    """One template raises at the first hint (Gemma's), another would show nothing and say nothing."""
    model = tmp_path / "no-system"
    shutil.copytree(tiny_folder, model)
    template = model / "chat_template.jinja"
    template.write_text(NO_SYSTEM[kind] + template.read_text())
    config = tiny_config(model=str(model), steps=2)
    why = "System role not supported" if kind == "refuses" else "leaves system messages out"
    with pytest.raises(ConfigError, match=rf"scaffold.enabled: .*the chat template of .*no-system has no place.*{why}"):
        run(config, *keys_of("ruscarl", grpo__mini_batch_prompts=1, scaffold__budget_tokens=256))
    assert not (config.parent / "runs" / "tiny").exists()
