"""Which of Liger's kernels are swapped in, where, and when not. They run on GPUs alone, so no numbers here."""

from __future__ import annotations

import pytest
import torch
from liger_kernel.transformers import LigerRMSNorm, LigerSwiGLUMLP
from liger_kernel.transformers.rope import liger_rotary_pos_emb
from transformers.models.qwen3 import modeling_qwen3

from rise_engine import liger
from rise_engine.config import EngineConfig
from rise_engine.liger import apply_liger
from rise_engine.policy import PolicyEngine
from tests.tiny import tiny_model


@pytest.fixture
def with_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for name in ("apply_rotary_pos_emb", "Qwen3RMSNorm", "Qwen3MLP"):  # Liger replaces them in the module: put back
        monkeypatch.setattr(modeling_qwen3, name, getattr(modeling_qwen3, name))


@pytest.mark.usefixtures("with_gpu")
def test_norms_mlps_and_rope_are_swapped_and_the_rest_is_not():
    model = tiny_model("qwen3-tied", 64)
    forward = type(model).forward
    assert apply_liger(model, "auto")
    for layer in model.model.layers:
        assert layer.mlp.forward.__func__ is LigerSwiGLUMLP.forward
        norms = (layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn.q_norm, layer.self_attn.k_norm)
        assert all(norm.forward.__func__ is LigerRMSNorm.forward for norm in norms)
    assert model.model.norm.forward.__func__ is LigerRMSNorm.forward
    assert modeling_qwen3.apply_rotary_pos_emb is liger_rotary_pos_emb
    assert model.forward.__func__ is forward, "Liger's fused cross-entropy would replace the head's losses"


@pytest.mark.usefixtures("with_gpu")
def test_what_liger_is_asked_for(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "liger_kernel.transformers._apply_liger_kernel_to_instance", lambda model, **flags: calls.append((model, flags))
    )
    model = tiny_model("llama", 64)
    assert not apply_liger(model, "off")
    assert apply_liger(model, "on")
    flags = {
        "rope": True,
        "rms_norm": True,
        "swiglu": True,
        "cross_entropy": False,
        "fused_linear_cross_entropy": False,
    }
    assert calls == [(model, flags)]


def test_on_is_refused_with_the_reason_and_auto_is_off(tiny_folder, monkeypatch):
    with pytest.raises(ValueError, match=r"engine\.liger: on, but Liger's kernels run on GPUs only"):
        PolicyEngine(tiny_folder("qwen3"), EngineConfig(liger="on"))
    assert not PolicyEngine(tiny_folder("qwen3"), EngineConfig()).liger
    model = tiny_model("qwen3", 64)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    model.config.model_type = "unheard-of"
    with pytest.raises(ValueError, match="no kernels for models of type unheard-of"):
        apply_liger(model, "on")
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="liger-kernel is not installed"):
        apply_liger(model, "on")
    assert not apply_liger(model, "auto")


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Liger's kernels need a GPU")
def test_log_probs_with_and_without_it_agree_in_float32(tiny_folder):
    results = [
        PolicyEngine(tiny_folder("qwen3"), EngineConfig(dtype="float32", liger=wanted)).logprobs(
            (5, 6, 7), [tuple(range(8, 40))], temperature=1.0
        )[0]
        for wanted in ("off", "on")
    ]
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)
