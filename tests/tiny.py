"""Tiny random models in real transformers folders, with a real byte-level BPE tokenizer and a ChatML template.

Built offline in about a second. Two stop ids, as Qwen3 has (<|im_end|> and <|endoftext|>), and a template whose
`enable_thinking=False` adds tokens to the prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Kind = Literal["qwen3", "qwen3-tied", "llama", "llama-tied"]
KINDS: tuple[Kind, ...] = ("qwen3", "qwen3-tied", "llama", "llama-tied")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

CORPUS = (
    "Write a short story about a river and the people who live beside it.",
    "Hello, my name is Anna. The water is cold, the weather is fine and the bread is fresh.",
    "A good answer names the cost, the rain, the doctor and the way home: one, two, three.",
    "Please list 10 things to do in the city on a Sunday morning! Why not ask someone who knows?",
)


def tiny_tokenizer(vocab_size: int = 384) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on four sentences: 5 special tokens, 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    tokenizer.train_from_iterator(
        CORPUS * 4,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=512
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(
    kind: Kind, vocab_size: int, *, seed: int = 0, scale: float = 10.0, head_dim: int = 8
) -> PreTrainedModel:
    """Random weights, spread by `scale` so that the distributions are far from uniform. Float32."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "tie_word_embeddings": kind.endswith("-tied"),
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if kind.startswith("qwen3"):
        model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**shape))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    model.generation_config.eos_token_id = [2, 0]
    model.generation_config.pad_token_id = 0
    return model


def make_tiny(
    folder: Path, kind: Kind = "qwen3-tied", *, seed: int = 0, scale: float = 10.0, head_dim: int = 8
) -> Path:
    """Writes model, tokenizer and generation config to `folder` and returns it. vLLM on a CPU needs head_dim 32."""
    tokenizer = tiny_tokenizer()
    tiny_model(kind, len(tokenizer), seed=seed, scale=scale, head_dim=head_dim).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
