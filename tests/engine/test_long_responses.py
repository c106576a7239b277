"""8192-token responses: what a training step allocates, whole model included, at a vocabulary where one array of logits
would dwarf all else.
"""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rise_engine.config import EngineConfig
from rise_engine.policy import PolicyEngine
from rise_engine.sequences import TrainSequence
from tests.kernels.memory import LiveBytes
from tests.tiny import tiny_tokenizer

VOCABULARY, HIDDEN, LAYERS, PROMPT, RESPONSE = 32_768, 64, 2, 64, 8192
BUDGET_MIB = 64
TOKENS = PROMPT + 2 * RESPONSE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=16_384,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    target = tmp_path_factory.mktemp("long") / "model"
    Qwen3ForCausalLM(config).save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("dtype, stage, checkpointing", [("float32", 0, False), ("bfloat16", 2, True)])
def test_a_step_on_8192_tokens_holds_no_logits_no_masks_and_no_copies_of_the_head(folder, dtype, stage, checkpointing):
    policy = PolicyEngine(
        folder,
        EngineConfig(
            dtype=dtype,
            zero_stage=stage,
            activation_checkpointing=checkpointing,
            micro_batch_tokens=TOKENS,
            head_budget_mib=BUDGET_MIB,
            deepspeed={"zero_optimization": {"reduce_bucket_size": 1_000_000}} if stage else {},
        ),
    )
    g = torch.Generator().manual_seed(0)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, VOCABULARY, (n,), generator=g).tolist())

    prompt = ids(PROMPT)
    sequences = [
        TrainSequence("a", prompt, ids(RESPONSE), 1e-4, 1.0),
        TrainSequence("a", prompt, ids(RESPONSE), 1e-4, is_guide=True),
    ]
    with LiveBytes() as live:
        stats = policy.train_step(sequences, temperature=1.0)
    assert (stats.tokens, stats.micro_batches) == (2 * RESPONSE, 1)
    assert stats.grad_norm > 0

    item = 4 if dtype == "float32" else 2
    weights = VOCABULARY * HIDDEN
    logits = 4 * 2 * RESPONSE * VOCABULARY
    mask = 2 * RESPONSE * (PROMPT + RESPONSE)  # one byte an element, one for each of two responses
    allowed = max(BUDGET_MIB << 20, 8 * weights)  # the head's workspace, or the two moments of one matrix
    assert allowed < min(logits, mask) / 1.5
    assert live.largest <= allowed
    # An activation is [T, width]; the norms, projections and products of a layer keep about 25 widths of D, and one
    # layer at a time is all that is kept under checkpointing, beside each layer's input.
    activations = TOKENS * HIDDEN * item * 25 * (1 if checkpointing else LAYERS)
    # Gradients and moments of embedding and head in float32, gradients in the model's type, the float32 dW.
    state = 2 * weights * (4 + 4 + 4 + item) + 4 * weights
    assert live.peak <= (BUDGET_MIB << 20) + activations + state
    assert live.peak < logits / 4
