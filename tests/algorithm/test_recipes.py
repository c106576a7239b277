"""The recipes: the paper's values, what each baseline changes, and the `base` that they share."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rise_rl.cli import app
from rise_rl.config import ConfigError, load_config
from rise_rl.run_folder import changed_keys

RECIPES = Path(__file__).parents[2] / "recipes"
LAMBDA = {"writing": 0.05, "chat": 0.05, "health": 0.01, "science": 0.01}
PAPER = [(domain, size) for domain in LAMBDA for size in ("4b", "14b")]


@pytest.mark.parametrize("domain, size", PAPER)
def test_paper_recipes_hold_the_values_of_its_tables(domain, size):
    path = RECIPES / "paper" / f"{domain}_{size}.yaml"
    result = CliRunner().invoke(app, ["train", str(path), "--dry-run"], catch_exceptions=False)
    assert result.exit_code == 0  # nothing is fetched: there is no such model here
    c = load_config(path)
    assert c.model == f"Qwen/Qwen3-{size.upper()}"
    assert c.guidance.coefficient == LAMBDA[domain]
    assert (c.grpo.prompts_per_step, c.data.max_prompt_tokens, c.rollout.max_new_tokens) == (64, 4096, 8192)
    assert (c.grpo.group_size, c.guidance.rollouts, c.guidance.criteria, c.guidance.gamma) == (8, 8, 5, 0.1)
    assert (c.engine.lr, c.engine.warmup_steps, c.engine.weight_decay) == (1e-6, 10, 0.1)
    assert (c.grpo.overlong_buffer, c.grpo.overlong_factor) == (4096, 0.5)
    assert (c.grpo.clip_low, c.grpo.clip_high, c.grpo.kl_coef, c.rollout.temperature) == (0.2, 0.28, 0.0, 1.0)


BASELINES = {
    "rubric_rl": {"guidance.enabled": False},
    "luffy_shaping": {"guidance.loss": "support"},
    "ruscarl": {
        "guidance.enabled": False,
        "scaffold.enabled": True,
        "grpo.mini_batch_prompts": 32,
        "grpo.kl_coef": 1e-3,
        "rollout.temperature": 0.7,
        "rollout.top_p": 0.8,
        "rollout.top_k": 20,
        "rollout.subset_sampling": True,
        "engine.warmup_steps": 0,
    },
}


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_change_what_they_say_and_nothing_else(name):
    ours = load_config(RECIPES / "paper" / "health_4b.yaml").model_dump()
    theirs = load_config(RECIPES / "baselines" / f"{name}.yaml").model_dump()
    changes = {key: new for key, (_, new) in changed_keys(ours, theirs).items()}
    assert changes.pop("name") == f"{name}_health_4b"
    assert changes == BASELINES[name]
    assert theirs["evaluation"] == ours["evaluation"]  # or held-out rewards would not compare
    assert theirs["evaluation"]["temperature"] == 1.0
    if name == "ruscarl":
        scaffold = theirs["scaffold"]
        assert (scaffold["steepness"], scaffold["midpoint"]) == (125.0, 0.2)
        assert theirs["grpo"]["importance_correction"] == "none"


def test_the_quickstart_is_evaluated_as_it_is_trained():
    """README's figures are of this temperature."""
    c = load_config(RECIPES / "quickstart.yaml")
    assert (c.rollout.temperature, c.evaluation.temperature) == (0.7, 0.7)


# --- base ------------------------------------------------------------------------------------------------------------


def test_a_file_goes_over_its_base_and_overrides_over_both(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "root.yaml").write_text("name: root\nmodel: m\nsteps: 3\ndata: {train: t}\ngrpo: {group_size: 4}\n")
    (tmp_path / "deep/middle.yaml").write_text("base: ../root.yaml\nsteps: 5\ngrpo: {clip_low: 0.1}\n")
    (tmp_path / "top.yaml").write_text("base: deep/middle.yaml\nname: top\ngrpo: {clip_high: 0.3}\n")
    c = load_config(tmp_path / "top.yaml", ["steps=7"])
    assert (c.name, c.model, c.steps) == ("top", "m", 7)
    assert (c.grpo.group_size, c.grpo.clip_low, c.grpo.clip_high) == (4, 0.1, 0.3)


@pytest.mark.parametrize(
    "text, message",
    [
        ("base: nowhere.yaml\n", r"a\.yaml: base: .*nowhere\.yaml: no such configuration file"),
        ("base: a.yaml\n", r"a\.yaml: base: .*a\.yaml is among the files that lead to it"),
        ("- a\n- list\n", r"a\.yaml: not a readable configuration: expected keys and values"),
    ],
)
def test_a_base_that_cannot_be_used_is_named(tmp_path, text, message):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "a.yaml")
