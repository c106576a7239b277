"""Peak memory of training a model of Qwen3's vocabulary with and without the RISE head, each in a fresh process.

    python bench/integrations.py            # TRL's GRPOTrainer and transformers' Trainer (SFT); minutes
    python bench/integrations.py --trainer trl --tokens 256

Memory is the most that the process's resident set grows during training (Linux only). The model is narrow (hidden 64,
two layers), so that what is compared is the vocabulary's share. The last gradient norms are printed too: they must
agree.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from _common import environment, print_table, resident_peak_bytes, write_results

VOCABULARY, BATCH, STEPS = 151_936, 8, 2


def model(vocabulary: int = VOCABULARY):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<unk>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def trl_trainer(rise: bool, tokens: int, folder: str):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from rise_rl.integrations.trl import RiseGRPOTrainer

    config = GRPOConfig(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        num_generations=BATCH,
        max_completion_length=tokens,
        learning_rate=1e-3,
        **_shared(),
    )
    return (RiseGRPOTrainer if rise else GRPOTrainer)(
        model=model(),
        reward_funcs=lambda completion_ids, **_: [float(sum(i % 7 for i in ids)) for ids in completion_ids],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a b c d e f g h"] * STEPS}),
        processing_class=tokenizer(),
    )


def transformers_trainer(rise: bool, tokens: int, folder: str):
    from transformers import Trainer, TrainingArguments

    from rise_rl.integrations.transformers import apply_rise_head

    rows = torch.randint(3, VOCABULARY, (STEPS * BATCH, tokens), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=1e-3, **_shared()
    )
    trained = model()
    if rise:
        apply_rise_head(trained)
    data = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(model=trained, args=arguments, train_dataset=data)


def _shared() -> dict[str, Any]:
    return {
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
    }


TRAINERS = {"trl": ("TRL GRPOTrainer", trl_trainer), "transformers": ("transformers Trainer", transformers_trainer)}


def measure(name: str, rise: bool, tokens: int) -> dict[str, Any]:
    """Trains in this process, which must be a fresh one."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TRAINERS[name][1](rise, tokens, folder)
        start = time.perf_counter()
        peak = resident_peak_bytes(trainer.train)
        seconds = time.perf_counter() - start
    steps = [{key: row[key] for key in ("loss", "grad_norm")} for row in trainer.state.log_history if "loss" in row]
    return {"peak_mib": None if peak is None else peak >> 20, "seconds": seconds, "steps": steps}


def fresh(name: str, rise: bool, tokens: int) -> dict[str, Any]:
    command = [
        sys.executable,
        __file__,
        "--trainer",
        name,
        "--tokens",
        str(tokens),
        "--only",
        "rise" if rise else "own",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", choices=TRAINERS, action="append")
    parser.add_argument("--tokens", type=int, default=128, help="of each of the 8 answers or rows")
    parser.add_argument("--only", choices=["own", "rise"], help="one measurement in this process, printed as JSON")
    parser.add_argument("--output", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    chosen = arguments.trainer or list(TRAINERS)
    if arguments.only:
        print(json.dumps(measure(chosen[0], arguments.only == "rise", arguments.tokens)))
        return
    results: dict[str, Any] = {"machine": environment("cpu"), "tokens": arguments.tokens}
    rows = []
    for name in chosen:
        results[name] = {key: fresh(name, key == "rise", arguments.tokens) for key in ("own", "rise")}
        used = {key: r["peak_mib"] for key, r in results[name].items()}
        results[name]["ratio"] = used["own"] / used["rise"]
        for key, label in (("own", "own head"), ("rise", "RISE head")):
            r = results[name][key]
            rows.append(
                [
                    f"{TRAINERS[name][0]}, {label}",
                    f"{used[key]}",
                    f"{r['seconds']:.1f}",
                    f"{r['steps'][-1]['grad_norm']:.5f}",
                ]
            )
        rows.append([f"{TRAINERS[name][0]}, own : RISE", f"{results[name]['ratio']:.1f}", "", ""])
    print_table(["", "MiB above the start", "seconds", "last gradient norm"], rows)
    if arguments.output:
        write_results(arguments.output, results)


if __name__ == "__main__":
    main()
