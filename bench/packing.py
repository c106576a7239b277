"""What computing a shared prompt once per group gains: one forward and backward pass over a group of responses.

    python bench/packing.py --model ~/.cache/rise-rl/smollm2-135m --group 8 --total 288

Prompt and response have --total tokens together, in the ratios 1:8, 1:2 and 2:1. Both layouts see the same sequences.
CPU seconds are given beside wall-clock seconds: on a shared machine they are the steadier of the two.
"""

from __future__ import annotations

import argparse
import time

import torch

from rise_engine.config import EngineConfig
from rise_engine.policy import PolicyEngine
from rise_engine.sequences import TrainSequence

RATIOS = ((1, 8), (1, 2), (2, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a transformers folder")
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--total", type=int, default=288, help="tokens of prompt and response together")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    policy = PolicyEngine(args.model, EngineConfig(lr=0.0, micro_batch_tokens=1 << 20))
    vocabulary = policy.model.config.vocab_size
    print(f"{'prompt:response':>16} {'layout':>14} {'wall s':>8} {'CPU s':>8}")
    for p, r in RATIOS:
        prompt = args.total * p // (p + r)
        g = torch.Generator().manual_seed(0)
        draw = torch.randint(5, vocabulary, (args.group + 1, args.total), generator=g).tolist()
        sequences = [
            TrainSequence("g", tuple(draw[0][:prompt]), tuple(row[prompt:]), 1e-4, (-1.0) ** i)
            for i, row in enumerate(draw[1:])
        ]
        spent = {}
        for layout in ("shared_prompt", "padded"):
            policy.layout = layout
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(args.repeats):
                policy.train_step(sequences, temperature=1.0)
            wall, cpu = ((x - y) / args.repeats for x, y in ((time.perf_counter(), wall), (time.process_time(), cpu)))
            spent[layout] = cpu
            print(f"{prompt:>8}:{args.total - prompt:<7} {layout:>14} {wall:8.2f} {cpu:8.2f}")
        print(f"{'':>16} padded / shared = {spent['padded'] / spent['shared_prompt']:.2f} (CPU s)")


if __name__ == "__main__":
    main()
