"""Adapters train as plain peft and torch train them, over a base that never moves; exports are plain models."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rise_engine import state
from rise_engine.config import EngineConfig
from rise_engine.lora import merged
from rise_engine.policy import PolicyEngine
from tests.engine.helpers import a_step, plain_logprobs, plain_model, plain_steps
from tests.engine.test_policy import weights

T = 0.7
QUICK = {"lr": 0.1, "eps": 1e-2, "warmup_steps": 0, "clip_norm": 1.0, "micro_batch_tokens": 45}
LORA = {"rank": 4, "alpha": 6}


def engine(folder, **keys) -> PolicyEngine:
    return PolicyEngine(folder, EngineConfig(**QUICK | {"lora": LORA} | keys))


def trained(policy: PolicyEngine, steps: int = 2) -> PolicyEngine:
    for seed in range(steps):
        policy.train_step(a_step(seed), temperature=T)
    return policy


@pytest.mark.parametrize(
    "stage, kind",
    [
        (0, "qwen3-tied"),
        (2, "llama"),
        pytest.param(3, "qwen3-tied", marks=pytest.mark.slow),
        pytest.param(3, "llama", marks=pytest.mark.slow),
    ],
)
def test_three_steps_equal_plain_peft_and_torch(tiny_folder, stage, kind):
    policy = engine(tiny_folder(kind), zero_stage=stage)
    before = weights(policy)
    base = plain_model(tiny_folder(kind))
    plain = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
    adapters = {n.removeprefix("base_model.model."): p for n, p in plain.named_parameters() if p.requires_grad}
    assert len(adapters) == 2 * 7 * 2  # seven linear layers in each of two blocks, the head not among them
    with torch.no_grad():
        for name, p in adapters.items():
            p.copy_(before[name])
    for p in plain.parameters():
        if not p.requires_grad:
            p.grad = torch.zeros_like(p)  # counts as nothing in the oracle's norm
    steps = [a_step(seed) for seed in range(3)]
    trainable = _Trainable(plain, list(adapters.values()))
    expected = plain_steps(trainable, steps, t=T, lr=QUICK["lr"], eps=QUICK["eps"], clip=QUICK["clip_norm"])
    for sequences, (loss, norm) in zip(steps, expected):
        stats = policy.train_step(sequences, temperature=T)
        assert stats.loss == pytest.approx(loss, rel=1e-4, abs=1e-5)
        assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
    after = weights(policy)
    for name, value in after.items():
        if name in adapters:
            moved = (adapters[name] - before[name]).abs().max()
            assert moved > 1e-3, name
            assert (value - adapters[name]).abs().max() < 1e-3 * moved, name
        else:
            assert torch.equal(value, before[name]), name


class _Trainable:
    """What `plain_steps` asks of a model, with the adapters alone as its parameters."""

    def __init__(self, model, parameters):
        self.model, self._parameters = model, parameters

    def __call__(self, **inputs):
        return self.model(**inputs)

    def parameters(self):
        return iter(self._parameters)


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_an_export_is_the_base_models_folder_with_the_adapters_merged(tiny_folder, tmp_path, stage):
    policy = trained(engine(tiny_folder("qwen3-tied"), zero_stage=stage))
    policy.export(tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    original = plain_model(tiny_folder("qwen3-tied")).state_dict()
    assert exported.state_dict().keys() == original.keys()
    changed = {name for name, value in exported.state_dict().items() if not torch.equal(value, original[name])}
    assert changed == {name for name in original if name.endswith("_proj.weight")}
    assert not list((tmp_path / "out").glob("adapter*"))
    [response] = policy.logprobs((5, 6, 7), [(8, 9, 10, 11)], temperature=T)
    with torch.no_grad():
        torch.testing.assert_close(
            response, plain_logprobs(exported, (5, 6, 7), (8, 9, 10, 11), T), atol=5e-5, rtol=1e-5
        )


def test_merged_weights_leave_the_policy_as_it_was_and_keep_the_base_models_names(tiny_folder):
    policy = trained(engine(tiny_folder("llama")))
    before = weights(policy)
    names = [name for name, _ in merged(policy.model, policy.model.named_parameters())]
    assert names == [name for name, _ in plain_model(tiny_folder("llama")).named_parameters()]
    assert all(torch.equal(value, before[name]) for name, value in weights(policy).items())
    plain = plain_model(tiny_folder("llama"))
    passed = dict(merged(plain, plain.named_parameters()))
    assert all(passed[name] is p for name, p in plain.named_parameters())


def test_merging_bfloat16_rounds_once():
    base = torch.nn.Sequential(torch.nn.Linear(16, 8, bias=True))
    peft_model = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, target_modules=["0"])).bfloat16()
    for p in peft_model.parameters():
        torch.nn.init.normal_(p)
    layer = base[0]
    w, a, b = (m.weight.double() for m in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]))
    found = dict(merged(base, base.named_parameters()))
    assert found.keys() == {"0.weight", "0.bias"}
    assert torch.equal(found["0.weight"], (w + 1.5 * (b @ a)).bfloat16())
    assert torch.equal(found["0.bias"], layer.base_layer.bias)


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_without_adapters_it_is_the_base_and_training_does_not_notice(tiny_folder, stage):
    policy, other = (trained(engine(tiny_folder("qwen3-tied"), zero_stage=stage)) for _ in range(2))
    prompt, response = (5, 6, 7), (8, 9, 10, 11)
    [adapted] = policy.logprobs(prompt, [response], temperature=T)
    with policy.without_adapters():
        [found] = policy.logprobs(prompt, [response], temperature=T)
    with torch.no_grad():
        base = plain_logprobs(plain_model(tiny_folder("qwen3-tied")), prompt, response, T)
    torch.testing.assert_close(found, base, atol=2e-5, rtol=1e-5)
    assert (adapted - base).abs().max() > 0.01
    assert torch.equal(policy.logprobs(prompt, [response], temperature=T)[0], adapted)
    assert trained(policy).train_step(a_step(5), temperature=T).grad_norm == (
        trained(other).train_step(a_step(5), temperature=T).grad_norm
    )
    for name, value in weights(policy).items():
        assert torch.equal(value, weights(other)[name]), name
    with (
        pytest.raises(ValueError, match=r"engine\.lora is null"),
        engine(tiny_folder("llama"), lora=None).without_adapters(),
    ):
        pass


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_resume_is_exact(tiny_folder, tmp_path, stage):
    policy = trained(engine(tiny_folder("qwen3-tied"), zero_stage=stage))
    (tmp_path / "c").mkdir()
    policy.save(tmp_path / "c")
    resumed = engine(tiny_folder("qwen3-tied"), zero_stage=stage)
    resumed.load(tmp_path / "c")
    for p in (policy, resumed):
        p.train_step(a_step(7), temperature=T)
    for name, value in weights(policy).items():
        assert torch.equal(value, weights(resumed)[name]), name


def test_checkpointing_gives_the_same_gradients(tiny_folder):
    results = [
        trained(engine(tiny_folder("qwen3-tied"), activation_checkpointing=on)).train_step(a_step(3), temperature=T)
        for on in (False, True)
    ]
    assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=1e-5)


@pytest.mark.parametrize(
    "targets, message",
    [
        (["q_proj", "lm_head"], "lm_head is the model's output head"),
        (["embed_tokens"], "embed_tokens is the model's token embedding"),
        (["mlp"], "mlp is a Qwen3MLP, expected an nn.Linear"),
        (["q_proj", "qproj"], "no layer is named 'qproj'; linear layers: down_proj, gate_proj, k_proj"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused_by_name(tiny_folder, targets, message):
    with pytest.raises(ValueError, match=r"engine\.lora\.target_modules: .*" + message):
        engine(tiny_folder("qwen3-tied"), lora=LORA | {"target_modules": targets})


def test_named_layers_alone_are_adapted(tiny_folder):
    policy = engine(tiny_folder("llama"), lora=LORA | {"target_modules": ["q_proj", "v_proj"]})
    adapted = {name.split(".lora_")[0].split(".")[-1] for name, p in policy.model.named_parameters() if p.requires_grad}
    assert adapted == {"q_proj", "v_proj"}
    assert json.loads(policy.config.model_dump_json())["lora"]["target_modules"] == ["q_proj", "v_proj"]


def test_an_export_holds_one_merged_weight_at_a_time_outside_host_memory(tiny_folder, tmp_path, monkeypatch):
    """Merged on the GPU, all of them together would be a second copy of the model there."""
    policy = trained(engine(tiny_folder("qwen3-tied")))
    seen: list[weakref.ref] = []
    alive: list[int] = []

    class OnGpu:
        """A tensor that is not where the model's are until it is fetched."""

        def __init__(self, tensor):
            self.tensor = tensor
            seen.append(weakref.ref(self))

        def data_ptr(self):
            return -1

        def cpu(self):
            return self.tensor

    def watched(model, weights):
        for name, tensor in merged(model, weights):
            alive.append(sum(ref() is not None for ref in seen))
            if "proj" in name:
                yield name, OnGpu(tensor)
            else:
                yield name, tensor

    policy.export(tmp_path / "expected")
    monkeypatch.setattr(state, "merged", watched)
    policy.export(tmp_path / "out")
    assert len(seen) == 2 * 7
    assert max(alive) == 1
    saved = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected")]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][key], saved[1][key]) for key in saved[0])
