"""One training step on recorded rollouts, ours and TRL's, on the same model folder, batch and machine.

Both trainers get the same token ids and the same rewards, and do the same work: log-probs of the responses under the
model, GRPO's clipped loss at ratio 1 averaged over all response tokens, backward, clipping at norm 1, AdamW. Their
gradient norms are printed beside their times: they must agree.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

EPS = 1e-4  # TRL's, in the advantage; used for ours too so that the losses are equal
LOW, HIGH, LR, DECAY = 0.2, 0.28, 1e-6, 0.1


@dataclass(frozen=True)
class Contender:
    """step() does one optimizer step and returns (seconds, gradient norm before clipping); use(...) changes what on."""

    step: Callable[[], tuple[float, float]]
    use: Callable[[Recorded], None]


QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@dataclass(frozen=True)
class Work:
    """A model's shape and a step's rollouts: `prompts` prompts with `group` responses each, all lengths in tokens.

    micro_batch: tokens per forward pass of ours; trl_batch: sequences per forward pass of TRL's.
    """

    vocab_size: int = 151_936
    hidden_size: int = 512
    intermediate_size: int = 1536
    num_hidden_layers: int = 2
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 64
    tie_word_embeddings: bool = True
    prompt: int = 128
    response: int = 1024
    group: int = 2
    prompts: int = 1
    checkpointing: bool = False
    dtype: str = "float32"
    micro_batch: int = 16384
    trl_batch: int = 1
    trl_compact: bool = True

    def model_config(self) -> dict[str, Any]:
        keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        keys += ("num_key_value_heads", "head_dim", "tie_word_embeddings")
        known = asdict(self)
        return {k: known[k] for k in keys} | {
            "max_position_embeddings": 1 << 16,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Recorded:
    """prompts[i], and its responses[i][j] of equal length with rewards[i][j]."""

    prompts: list[list[int]]
    responses: list[list[list[int]]]
    rewards: list[list[float]]

    @staticmethod
    def draw(work: Work, seed: int = 0) -> Recorded:
        """Random ids that the tokenizer knows, no stop token among them; rewards with no two equal in a group."""
        g = torch.Generator().manual_seed(seed)

        def ids(n: int) -> list[int]:
            return torch.randint(5, 380, (n,), generator=g).tolist()

        return Recorded(
            [ids(work.prompt) for _ in range(work.prompts)],
            [[ids(work.response) for _ in range(work.group)] for _ in range(work.prompts)],
            [torch.rand(work.group, generator=g).tolist() for _ in range(work.prompts)],
        )


def write_model(work: Work, folder: Path) -> Path:
    """A Qwen3 of random weights and a small tokenizer. Nothing is done if the folder already holds one."""
    if (folder / "config.json").exists():
        return folder
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.tiny import tiny_tokenizer

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**work.model_config())).to(getattr(torch, work.dtype))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def quiet() -> None:
    import logging

    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def ours(work: Work, folder: Path, recorded: Recorded) -> Contender:
    """rise_engine's PolicyEngine.train_step, ZeRO stage 0 (on a GPU in bfloat16: 2), every other setting its own."""
    from rise_engine.config import EngineConfig
    from rise_engine.policy import PolicyEngine
    from rise_engine.sequences import TrainSequence

    config = EngineConfig(
        dtype=work.dtype,
        lr=LR,
        warmup_steps=0,
        weight_decay=DECAY,
        micro_batch_tokens=work.micro_batch,
        activation_checkpointing=work.checkpointing,
    )
    policy = PolicyEngine(folder, config)
    sequences: list[TrainSequence] = []

    def use(recorded: Recorded) -> None:
        sequences.clear()
        total = sum(len(r) for responses in recorded.responses for r in responses)
        for i, (prompt, responses, rewards) in enumerate(zip(recorded.prompts, recorded.responses, recorded.rewards)):
            r = torch.tensor(rewards)
            advantages = ((r - r.mean()) / (r.std() + EPS)).tolist()
            sequences.extend(
                TrainSequence(f"{i}", tuple(prompt), tuple(response), 1.0 / total, advantage)
                for response, advantage in zip(responses, advantages)
            )

    def step() -> tuple[float, float]:
        started = time.perf_counter()
        stats = policy.train_step(sequences, temperature=1.0)
        synchronize()
        return time.perf_counter() - started, stats.grad_norm

    use(recorded)
    return Contender(step, use)


def trl(work: Work, folder: Path, recorded: Recorded, steps: int) -> Contender:
    """TRL's GRPOTrainer with its chunked log-probs, fed by its own `rollout_func`; at most `steps` calls.

    The real Trainer loop runs in a thread that is let go for one optimizer step per call. What it does before the first
    one (accelerate's state is global: another trainer may come only after it) is done here. Its generation-and-scoring
    step (here: handing over and padding what was recorded) is not counted in its time. Liger's layer kernels are Triton
    ones: used on a GPU only. On a GPU TRL computes log-probs of response tokens alone; on a CPU it would compute those
    of prompt tokens too, for the sake of compilers of fixed shapes: `trl_compact` gives it the better way here as well.
    """
    import trl.trainer.utils
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    if work.trl_compact:
        trl.trainer.utils._use_triton = lambda device: True
    ready, go, done = (threading.Semaphore(0) for _ in range(3))
    outcome: dict[str, Any] = {}
    current = [recorded]
    served = [0] * work.prompts

    def rollouts(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        recorded = current[0]
        chosen = []
        for text in prompts:
            i = int(text)
            chosen.append((i, served[i] % work.group))
            served[i] += 1
        return {
            "prompt_ids": [list(recorded.prompts[i]) for i, _ in chosen],
            "completion_ids": [list(recorded.responses[i][j]) for i, j in chosen],
            "logprobs": None,
            "recorded_reward": [recorded.rewards[i][j] for i, j in chosen],
        }

    class Recording(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            started = time.perf_counter()
            found = super()._generate_and_score_completions(inputs)
            outcome["waited"] = outcome.get("waited", 0.0) + time.perf_counter() - started
            return found

    class Gate(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            ready.release()

        def on_step_begin(self, args, state, control, **kwargs):
            go.acquire()
            outcome["waited"] = 0.0
            outcome["started"] = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            synchronize()
            outcome["seconds"] = time.perf_counter() - outcome["started"] - outcome["waited"]

        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "grad_norm" in logs:
                outcome["norm"] = float(logs["grad_norm"])
                done.release()

    total = work.prompts * work.group
    args = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=work.trl_batch,
        gradient_accumulation_steps=total // work.trl_batch,
        num_generations=work.group,
        max_completion_length=work.response,
        max_steps=steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=DECAY,
        max_grad_norm=1.0,
        epsilon=LOW,
        epsilon_high=HIGH,
        loss_type="dapo",
        beta=0.0,
        bf16=False,  # the model is loaded in the type that is wanted
        gradient_checkpointing=work.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if work.checkpointing else None,
        use_liger_kernel=work.device == "cuda",
        use_cpu=work.device == "cpu",
        shuffle_dataset=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Recording(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, work.dtype)),
        reward_funcs=lambda recorded_reward, **_: recorded_reward,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(work.prompts)]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        rollout_func=rollouts,
        callbacks=[Gate()],
    )
    if trainer.accelerator.num_processes != 1 or str(trainer.accelerator.distributed_type) != "DistributedType.NO":
        raise RuntimeError("build TRL's trainer first: it would wrap its model in DDP in ours' process group")
    trainer.remove_callback(next(c for c in trainer.callback_handler.callbacks if "Printer" in type(c).__name__))

    def run() -> None:
        try:
            trainer.train()
        except BaseException as error:
            outcome["error"] = error
            ready.release()
            done.release()

    threading.Thread(target=run, daemon=True).start()
    ready.acquire()

    def step() -> tuple[float, float]:
        go.release()
        done.acquire()
        if "error" in outcome:
            raise RuntimeError("TRL's trainer failed") from outcome["error"]
        return outcome["seconds"], outcome["norm"]

    return Contender(step, lambda other: current.__setitem__(0, other))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def dump(work: Work) -> str:
    return json.dumps(asdict(work))


def load(text: str) -> Work:
    return Work(**json.loads(text))
