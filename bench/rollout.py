"""Tokens per second of TransformersRollout against transformers' own `generate`, same model, prompts and lengths.

    python bench/rollout.py --model ~/.cache/rise-rl/smollm2-135m --rows 8 32 --new-tokens 32

CPU seconds are given beside wall-clock seconds: on a shared machine they are the steadier of the two.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from rise_engine.config import EngineConfig
from rise_engine.policy import PolicyEngine
from rise_engine.prompts import render_prompt
from rise_engine.rollout.base import RolloutRequest, Sampling
from rise_engine.rollout.transformers import TransformersRollout

QUESTIONS = (
    "Write a short poem about the sea.",
    "Give me some advice about how to sleep better, please.",
    "Tell me about the moon.",
    "What should I cook tonight with potatoes and onions?",
)


def timed(name: str, tokens: int, work: Callable[[], object]) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{name:34s} {tokens:6d} tokens {wall:7.2f} s {tokens / wall:7.1f} tokens/s {tokens / cpu:7.1f} tokens/CPU-s")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a transformers folder with a chat template")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--skip-generate", action="store_true", help="do not run transformers' generate")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    policy = PolicyEngine(args.model, EngineConfig())
    policy.stop_ids = (policy.model.config.vocab_size - 1,)  # a token nobody samples: equal work for both
    rollouts = TransformersRollout(policy, max_rows=max(args.rows))
    rollouts.sync(0)
    prompts = [render_prompt(policy.tokenizer, [{"role": "user", "content": q}]) for q in QUESTIONS]
    for rows in args.rows:
        chosen = [prompts[i % len(prompts)] for i in range(rows)]
        tokens = rows * args.new_tokens
        requests = [RolloutRequest("bench", i, p, seed=i) for i, p in enumerate(chosen)]
        timed(
            f"TransformersRollout, {rows} rows",
            tokens,
            lambda requests=requests: rollouts.generate(requests, Sampling(args.new_tokens)),
        )
        if args.skip_generate:
            continue
        width = max(map(len, chosen))
        batch = {
            "input_ids": torch.tensor([[policy.pad_id] * (width - len(p)) + list(p) for p in chosen]),
            "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in chosen]),
        }
        policy.model.set_attn_implementation("sdpa")
        timed(
            f"transformers generate, {rows} rows",
            tokens,
            lambda batch=batch: policy.model.generate(
                **batch,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                max_new_tokens=args.new_tokens,
                min_new_tokens=args.new_tokens,
            ),
        )
        policy.model.set_attn_implementation("rise_packed")


if __name__ == "__main__":
    main()
