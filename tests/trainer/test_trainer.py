"""Algorithm 1 on a tiny model, through `run_training` as the command line calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import rise_rl.trainer
from rise_engine.parity import ParityError
from rise_rl.config import load_config
from rise_rl.graders.errors import JudgeUnavailable
from rise_rl.launch import run_training
from rise_rl.run_folder import RunFolder
from tests.graders.fake_server import FakeJudge, Reply, honest
from tests.trainer.conftest import row


def run(config: Path, *overrides: str) -> tuple[list[dict], Path]:
    folder = run_training(load_config(config, overrides))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], folder


def records(folder: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (folder / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()]


def test_guidance_is_removed_for_good(tiny_config):
    metrics, folder = run(tiny_config(steps=4, guidance__remove_at=2, evaluation__every=0, checkpoint__every=0))
    assert [m["guidance/active"] for m in metrics] == [True, True, False, False]
    assert [m["lambda"] for m in metrics] == [0.5, 0.5, 0.0, 0.0]
    assert all(m["guided/generated"] > 0 for m in metrics[:2])
    assert [m["guided/generated"] for m in metrics[2:]] == [0, 0]
    assert [m["gap/raw"] for m in metrics[2:]] == [None, None]
    for step, m in enumerate(metrics, 1):
        kinds = [r["kind"] for r in records(folder, step)]
        assert kinds.count("natural") == 2 * 4
        assert kinds.count("guided") == m["guided/generated"]


def test_coupled_guidance_has_no_guide_loss_to_weigh(tiny_config):
    config = tiny_config(steps=2, guidance__remove_at=1, evaluation__every=0, checkpoint__every=0)
    metrics, _ = run(config, "guidance.coupled=true")
    assert metrics[0]["guided/generated"] > 0
    assert [m["lambda"] for m in metrics] == [0.0, 0.0]
    assert all(m["kl"] is None and m["loss/guide"] == 0 for m in metrics)


def test_guided_answers_saw_the_hint_and_their_criteria_were_missed(tiny_config):
    _, folder = run(tiny_config(steps=1, evaluation__every=0, checkpoint__every=0))
    everything = records(folder, 1)
    guided = [r for r in everything if r["kind"] == "guided"]
    assert guided
    for r in guided:
        naturals = [n for n in everything if n["kind"] == "natural" and n["uid"] == r["uid"]]
        assert 1 <= len(r["shown"]) <= 2
        assert all(any(n["verdicts"][k] < 1 for n in naturals) for k in r["shown"])


def test_guidance_changes_nothing_before_the_first_update(tiny_config):
    config = tiny_config(steps=2, evaluation__every=0, checkpoint__every=0, guidance__coefficient=5.0)
    _, guided = run(config, "name=guided")
    plain_metrics, plain = run(config, "name=plain", "guidance.enabled=false")

    def natural(folder, step):
        return [r for r in records(folder, step) if r["kind"] == "natural"]

    assert natural(guided, 1) == natural(plain, 1)
    assert natural(guided, 2) != natural(plain, 2)  # the guide loss has moved the weights
    assert all(m["guided/generated"] == 0 and m["loss/guide"] == 0 for m in plain_metrics)


def test_seeds_decide_the_rollouts(tiny_config):
    config = tiny_config(steps=1, evaluation__every=0, checkpoint__every=0)
    first, again, other = (run(config, f"name={n}", f"seed={s}")[1] for n, s in [("a", 3), ("b", 3), ("c", 4)])
    assert records(first, 1) == records(again, 1)
    assert [r["response"] for r in records(first, 1)] != [r["response"] for r in records(other, 1)]
    responses = [r["response"] for r in records(first, 1)]
    assert len(set(responses)) > len(responses) // 2  # every rollout has a seed of its own


def test_the_first_pass_of_a_step_is_on_policy(tiny_config):
    metrics, _ = run(tiny_config(steps=2, evaluation__every=0, checkpoint__every=0, rollout__temperature=0.6))
    for m in metrics:
        assert m["ratio/mean"] == m["ratio/max"] == 1.0
        assert m["clip_fraction"] == 0.0
        assert m["logprob_gap/max"] < 1e-3


def test_a_judge_that_fails_makes_unknown_verdicts_and_no_rewards(tiny_config):
    config = tiny_config(steps=1, evaluation__every=0, checkpoint__every=0)
    lines = []
    for i in range(2):
        example = row(f"j{i}", ["water"])
        example["reward_model"]["rubrics"].append(
            {"criterion": f"is kind {i}", "points": 4, "tags": {"verifier": "llm"}}
        )
        lines.append(json.dumps(example) + "\n")
    (config.parent / "train.jsonl").write_text("".join(lines))

    def half_broken(request):
        return Reply("no verdict at all") if "is kind 1" in json.dumps(request) else honest(request)

    with FakeJudge(half_broken) as server:
        settings = yaml.safe_load(config.read_text())
        settings["judge"] = {"base_urls": [server.url], "model": "fake", "max_retries": 0}
        config.write_text(yaml.safe_dump(settings))
        [m], folder = run(config)
    assert m["judge/calls"] > 0
    for r in records(folder, 1):
        ungraded = r["uid"] == "j1"
        assert (r["verdicts"][3] is None) == ungraded
        assert (r["reward"] is None) == ungraded
    broken = sum(r["uid"] == "j1" for r in records(folder, 1))
    assert m["unknown_verdicts"] == m["ungraded_samples"] == broken > 0
    assert m["sequences/forwarded"] + m["sequences/skipped"] <= 4 + 2  # only the graded prompt takes part


@pytest.mark.parametrize("every, of", [(0, "step 1: all 8 answers"), (1, "held-out evaluation: all 4 answers")])
def test_a_run_of_which_nothing_can_be_graded_stops(tiny_config, monkeypatch, every, of):
    class Mute:
        def grade(self, items):
            return [[None] * len(item.criteria) for item in items]

    monkeypatch.setattr("rise_rl.launch.grader_for", lambda *_, **__: Mute())
    with pytest.raises(JudgeUnavailable, match=of):
        run_training(load_config(tiny_config(steps=1, evaluation__every=every)))


def fails_once(monkeypatch, name: str, at: int, error: Exception) -> list[int]:
    """The trainer's function `name` raises `error` at its `at`-th call; returns a list that grows with every call."""
    function, calls = getattr(rise_rl.trainer, name), []

    def counted(*args, **keywords):
        calls.append(1)
        if len(calls) == at:
            raise error
        return function(*args, **keywords)

    monkeypatch.setattr(rise_rl.trainer, name, counted)
    return calls


def assert_resumes_to(whole: Path, config: Path, *, after: int) -> Path:
    """The run goes on after that step, and ends as the one that nothing stopped."""
    folder = run_training(load_config(config), resume=True)
    found, expected = RunFolder(folder), RunFolder(whole)
    assert [r["after_step"] for r in found.manifest()["resumes"]] == [after]
    assert [m["loss"] for m in found.metrics()] == [m["loss"] for m in expected.metrics()]
    assert found.evals() == expected.evals()
    return folder


def test_a_judge_that_is_down_during_an_evaluation_costs_no_step_and_the_evaluation_comes_later(
    tiny_config, monkeypatch
):
    config = tiny_config(steps=4, checkpoint__every=0)  # evaluates after 0, 2 and 4 steps
    _, whole = run(config, "name=whole")
    calls = fails_once(monkeypatch, "evaluate", 2, JudgeUnavailable("the judge is down"))
    with pytest.raises(JudgeUnavailable):
        run(config)
    assert_resumes_to(whole, config, after=2)
    run_training(load_config(config), resume=True)  # nothing is left to do: no evaluation is repeated
    assert len(calls) == 4


def test_a_sync_that_fails_after_an_update_costs_no_step(tiny_config, monkeypatch):
    config = tiny_config(steps=4, checkpoint__every=0)
    _, whole = run(config, "name=whole")
    fails_once(monkeypatch, "parity_probe", 4, ParityError("the weights are old"))  # the first is at the start
    with pytest.raises(ParityError):
        run(config)
    folder = assert_resumes_to(whole, config, after=3)
    for name in ("step_000003.jsonl", "step_000004.jsonl"):
        assert (folder / "rollouts" / name).read_bytes() == (whole / "rollouts" / name).read_bytes()


@pytest.mark.parametrize("model_kind", ["qwen3", "llama"])
def test_untied_models_train_too(tiny_config, tmp_path, model_kind):
    from tests.tiny import make_tiny

    model = make_tiny(tmp_path / "untied", model_kind, scale=4.0)
    metrics, folder = run(tiny_config(steps=2, model=str(model), checkpoint__every=0))
    assert all(m["grad_norm"] > 0 for m in metrics)
    assert len((folder / "evals.jsonl").read_text().splitlines()) == 2


def test_guidance_ends_at_the_plateau_of_the_gap(tiny_config):
    settings = yaml.safe_load(tiny_config(steps=6, evaluation__every=0, checkpoint__every=0).read_text())
    settings["guidance"] |= {"remove_at": "plateau", "plateau": {"window": 2, "tolerance": 1.0}}
    path = Path(settings["data"]["train"]).parent / "plateau.yaml"
    path.write_text(yaml.safe_dump(settings))
    metrics, _ = run(path)
    # rewards lie in [0, 1], so nothing moves by more than 1: a first gap, then two that stand still
    assert [m["guidance/active"] for m in metrics] == [True, True, True, False, False, False]


def test_length_penalty_and_masking_reach_the_loss(tiny_config):
    config = tiny_config(steps=1, evaluation__every=0, checkpoint__every=0)
    [plain], folder = run(config, "name=plain")
    [shaped], _ = run(config, "name=shaped", "grpo.overlong_buffer=24", "grpo.overlong_factor=0.5")
    [masked], _ = run(config, "name=masked", "grpo.mask_truncated=true", "guidance.drop_truncated=true")
    lengths = [r["tokens"] for r in records(folder, 1) if r["kind"] == "natural"]
    assert plain["overlong_penalty/mean"] == 0.0
    assert shaped["overlong_penalty/mean"] == pytest.approx(-0.5 * sum(lengths) / 24 / len(lengths))
    assert shaped["reward/natural"] == plain["reward/natural"]
    assert shaped["reward/shaped"] == pytest.approx(shaped["reward/natural"] + shaped["overlong_penalty/mean"])
    everything = records(folder, 1)
    assert any(r["finish_reason"] == "length" for r in everything)
    whole = [r for r in everything if r["kind"] == "natural" and r["finish_reason"] == "stop"]
    kept = masked["guided/kept"]
    assert masked["sequences/forwarded"] + masked["sequences/skipped"] == len(whole) + kept
