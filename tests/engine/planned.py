"""What the tests of the memory plan begin with: a small model, one rank on a CPU, and a little work."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rise_engine.memory_plan import ModelShape, Setting, Workload

KIND = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
KIND["llama"] = (LlamaConfig, LlamaForCausalLM)
FIELDS = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
SETTING = Setting(ranks=1, stage=0, dtype_bytes=4, checkpointing=False, head_budget=512 << 20, on_cpu=True)
WORK = Workload(prompt=100, response=50, group=4, micro_batch=4096, packed=True, several=True, rows=8)
GIB = 2**30


def small(kind: str = "qwen3", **changes) -> ModelShape:
    return ModelShape.from_config(KIND[kind][0](**FIELDS | changes).to_dict())
