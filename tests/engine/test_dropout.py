"""A training pass computes what a scoring pass does, whatever dropout the model was made with."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy

import pytest
import torch
from transformers import FalconConfig, GPT2Config, LlamaConfig, MixtralConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from rise_engine.config import EngineConfig
from rise_engine.dropout import without_dropout
from rise_engine.policy import PolicyEngine
from rise_kernels.token_losses import LossSpec
from rise_rl.update import update
from tests.engine.helpers import a_step

SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS = {
    "an attribute of the attention": LlamaConfig(**SHAPE, intermediate_size=48, attention_dropout=0.5),
    "dropout modules": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32),  # 0.1 each
    "the configuration": FalconConfig(**SHAPE, attention_dropout=0.5, hidden_dropout=0.5),
    "router noise": MixtralConfig(
        **SHAPE, intermediate_size=48, num_key_value_heads=4, num_local_experts=4, router_jitter_noise=0.9
    ),
}


@pytest.mark.parametrize("where", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_rate_is_left_wherever_the_model_reads_it(where: str, attention: str):
    config: PretrainedConfig = deepcopy(KINDS[where])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    ids = torch.arange(1, 13)[None]

    def logits(training: bool) -> torch.Tensor:
        with torch.no_grad():
            return model.train(training)(input_ids=ids).logits

    expected = logits(False)
    assert not torch.allclose(logits(True), expected, atol=1e-3)
    without_dropout(model)
    assert torch.equal(logits(False), expected)
    torch.testing.assert_close(logits(True), expected, atol=1e-5, rtol=1e-5)


def test_a_policy_that_has_not_moved_has_ratio_1_and_no_kl(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | {"attention_dropout": 0.1}
    (folder / "config.json").write_text(json.dumps(config))
    keys = EngineConfig(lr=0.0, warmup_steps=0, micro_batch_tokens=200)
    policy = PolicyEngine(folder, keys, loss=LossSpec(kl_coef=0.1))
    stats = update(policy, [a_step(seed, prompts=2) for seed in range(2)], temperature=1.0, reference=policy)
    assert stats.ratio_max == pytest.approx(1.0, abs=1e-4)
    assert stats.clip_fraction == 0.0
    assert stats.kl == pytest.approx(0.0, abs=1e-6)
