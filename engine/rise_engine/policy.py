"""The policy: a transformers model under DeepSpeed that computes log-probs and takes optimizer steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import deepspeed
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rise_kernels.results import RiseLoss, TokenStats
from rise_kernels.token_losses import LossSpec, TokenRows

from . import agreement, lora, state
from .config import EngineConfig
from .deepspeed_config import deepspeed_config
from .distributed import all_ranks_max, all_ranks_sum, init_distributed, seed_everything
from .fingerprint import fingerprint
from .gather import gather_rows, install_embedding
from .head import install_head
from .liger import apply_liger
from .loading import load_model, load_tokenizer, padding_id, stop_ids
from .optimizer import NonFiniteError, build_optimizer, clip_before_step, learning_rate
from .packing import Chunk, HasTokens, MicroBatch, build, choose_layout, plan
from .scoring import Tokens, token_logprobs
from .sequences import StepStats, TrainSequence
from .token_rows import StepStatistics, can_matter, check_consistent, make_rows


class PolicyModule(nn.Module):
    """Backbone and head as one module whose forward ends in log-probs or a loss: what DeepSpeed is given."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        batch: MicroBatch,
        rows: TokenRows | None = None,
        *,
        temperature: float,
        with_entropy: bool = True,
    ) -> TokenStats | RiseLoss:
        if batch.layout is None:
            where = {"attention_mask": batch.attention_mask}
        else:
            # A 4-D mask is passed on untouched, so transformers builds none; the layout says who sees whom.
            where = {"attention_mask": batch.input_ids.new_zeros(1, 1, 1, 1), "layout": batch.layout}
        hidden = self.model.base_model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **where
        ).last_hidden_state
        picked = gather_rows(hidden.flatten(0, 1), batch.hidden_rows)
        head = self.model.get_output_embeddings()
        return head(picked, batch.target, rows, temperature=temperature, with_entropy=with_entropy)


class PolicyEngine:
    """One policy on one or many ranks.

    model: a local transformers folder or a hub id. step: optimizer steps done, skipped ones included; skipped: how
    many had nothing to learn from. layout: how sequences are packed (packing.py). initial: the fingerprint of the model
    it was made from, where a run goes on needing that one and a checkpoint does not hold it: as the frozen base of
    adapters, as the reference of a KL term.
    Raises OSError where the model cannot be loaded and ValueError where it cannot be trained.
    """

    def __init__(self, model: str | Path, config: EngineConfig, *, loss: LossSpec | None = None, seed: int = 0) -> None:
        self.config = config
        self.loss = loss or LossSpec()
        self.step = 0
        self.skipped = 0
        self.rank, self.world_size, self.device = init_distributed(timedelta(minutes=config.timeout_minutes))
        seed_everything(seed)

        self.source = str(model)
        self.tokenizer = agreement.each(load_tokenizer, model)
        self.model = agreement.each(load_model, model, dtype=config.torch_dtype, attention="sdpa")
        needed = config.lora is not None or self.loss.kl_coef != 0
        self.initial = agreement.once(fingerprint, self.model) if needed else None
        self.stop_ids = stop_ids(self.model, self.tokenizer)
        self.pad_id = padding_id(self.tokenizer)
        self.layout = choose_layout(self.model, config.attention)
        self.liger = apply_liger(self.model, config.liger)
        if config.lora is not None:
            lora.add_adapters(self.model, config.lora)
        install_embedding(self.model)
        install_head(self.model, self.loss, config.head_budget_mib)
        if config.activation_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

        module = PolicyModule(self.model)
        optimizer = agreement.each(build_optimizer, module, config)
        self._clipped_norm = None
        settings = deepspeed_config(config, self.world_size)
        if settings["zero_optimization"]["stage"] == 0:
            self._clipped_norm = clip_before_step(optimizer, settings["gradient_clipping"])
            settings["gradient_clipping"] = 0.0
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings, dist_init_required=False
        )
        self.engine.eval()

    @property
    def context_length(self) -> int:
        return int(self.model.config.get_text_config().max_position_embeddings)

    # --- training --------------------------------------------------------------------------------------------------

    def train_step(self, sequences: Sequence[TrainSequence], *, temperature: float) -> StepStats:
        """One optimizer step over this rank's sequences: k forward and backward passes, one update.

        Sequences whose gradient is exactly 0 are not forwarded. If no rank has any left the update is skipped, so that
        neither weights nor Adam's moments move; the step still counts.
        Raises NonFiniteError, naming the sequences, before anything is updated. Collective: all ranks call it together.
        """
        started = time.perf_counter()
        agreement.each(self._check, sequences)
        forwarded = [s for s in sequences if can_matter(s, self.loss)]
        batches = plan(forwarded, self.config.micro_batch_tokens, self.layout)
        rounds = int(all_ranks_max(len(batches), self.device))
        skip = not all_ranks_max(len(forwarded), self.device)
        rate = learning_rate(self.config, self.step)

        statistics = StepStatistics(self.device, self.loss.is_cap)
        self.engine.train()
        try:
            for i in range(rounds):
                if i < len(batches):
                    self._forward_backward(forwarded, batches[i], temperature, statistics, backward=not skip)
                else:
                    self._idle_pass(temperature, backward=not skip)
            norm = 0.0 if skip else self._update(rate, statistics, forwarded)
        finally:
            self.engine.eval()
        loss, policy_loss, guide_loss = (value / self.world_size for value in statistics.total_loss())
        self.step += 1
        self.skipped += skip
        return StepStats(
            loss=loss,
            policy_loss=policy_loss,
            guide_loss=guide_loss,
            grad_norm=norm,
            lr=rate,
            forwarded_sequences=int(all_ranks_sum(torch.tensor(len(forwarded), device=self.device))),
            micro_batches=rounds,
            skipped=bool(skip),
            **statistics.summary(),
            seconds=time.perf_counter() - started,
        )

    def _forward_backward(
        self,
        sequences: Sequence[TrainSequence],
        chunks: Sequence[Chunk],
        temperature: float,
        statistics: StepStatistics | None,
        *,
        backward: bool,
    ) -> None:
        batch = self._build(sequences, chunks)
        # DeepSpeed averages gradients over ranks; the weights already hold every normaliser, so undo that here.
        rows = make_rows(batch, sequences, self.loss, scale=self.world_size, device=self.device)
        with torch.set_grad_enabled(backward):
            result = self.engine(batch, rows, temperature=temperature)
        if statistics is not None:
            detached = RiseLoss(*(None if x is None else x.detach() for x in result))
            statistics.add(batch, rows, sequences, detached)
        if backward:
            self.engine.backward(result.loss)

    def _idle_pass(self, temperature: float, *, backward: bool) -> None:
        """A pass of weight 0, to keep step with ranks that have more micro-batches."""
        nothing = [TrainSequence("idle", (self.pad_id,), (self.pad_id,), token_weight=0.0)]
        chunks = plan(nothing, self.config.micro_batch_tokens, self.layout)[0]
        self._forward_backward(nothing, chunks, temperature, None, backward=backward)

    def _update(self, rate: float, statistics: StepStatistics, sequences: Sequence[TrainSequence]) -> float:
        """The optimizer step; returns the gradient norm before clipping."""
        if not all(map(math.isfinite, statistics.total_loss())):
            culprits = [uid for uids in agreement.gather(statistics.non_finite, sequences) for uid in uids]
            where = f"in sequences {', '.join(culprits)}" if culprits else "in its sum, while every token's is"
            message = f"step {self.step + 1}: the loss is not finite ({where}); nothing was updated"
            raise agreement.everywhere(NonFiniteError(message))
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        try:
            self.engine.step()
        except NonFiniteError as error:
            raise self._bad_norm(sequences) from error
        if self._clipped_norm is not None:
            return self._clipped_norm()
        if not self.engine.was_step_applied():
            raise self._bad_norm(sequences)
        return float(self.engine.get_global_grad_norm())

    def _bad_norm(self, sequences: Sequence[TrainSequence]) -> NonFiniteError:
        uids = sorted({uid for uids in agreement.gather(lambda: {s.uid for s in sequences}) for uid in uids})
        message = f"step {self.step + 1}: the gradient norm is not finite though every loss is (prompts "
        return agreement.everywhere(NonFiniteError(f"{message}{', '.join(uids)}); nothing was updated"))

    # --- log-probs -------------------------------------------------------------------------------------------------

    def score(self, sequences: Sequence[HasTokens], *, temperature: float) -> list[Tensor]:
        """Log-prob of every response token of this rank's sequences: float32 [len(response)] on the CPU, no gradient.

        Collective: all ranks call it together.
        """
        agreement.each(self.check_tokens, sequences)
        return token_logprobs(
            self.engine.module,
            sequences,
            temperature=temperature,
            budget=self.config.micro_batch_tokens,
            layout=self.layout,
            pad_id=self.pad_id,
            device=self.device,
        )

    def logprobs(
        self, prompt_ids: Sequence[int], response_ids: Sequence[Sequence[int]], *, temperature: float
    ) -> list[Tensor]:
        """`score` of several responses to one prompt."""
        return self.score([Tokens(tuple(prompt_ids), tuple(r)) for r in response_ids], temperature=temperature)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside, log-probs are the frozen base model's: the reference policy of a LoRA run, at no memory.

        Raises ValueError without engine.lora.
        """
        with lora.without_adapters(self.model):
            yield

    def _build(self, sequences: Sequence[HasTokens], chunks: Sequence[Chunk]) -> MicroBatch:
        return build(sequences, chunks, self.layout, pad_id=self.pad_id, device=self.device)

    def _check(self, sequences: Sequence[TrainSequence]) -> None:
        check_consistent(sequences, self.loss)
        self.check_tokens(sequences)

    def check_tokens(self, sequences: Sequence[HasTokens]) -> None:
        """ValueError for a sequence that the model cannot take. To be called through `agreement.each`: in a forward
        pass it would fail on one rank alone, with the others waiting for it.
        """
        vocabulary = self.model.config.get_text_config().vocab_size
        for s in sequences:
            tokens = len(s.prompt_ids) + len(s.response_ids)
            if tokens > self.context_length:
                raise ValueError(f"sequence of {tokens} tokens: the model's context is {self.context_length}")
            for name, ids in (("prompt_ids", s.prompt_ids), ("response_ids", s.response_ids)):
                if not ids:
                    raise ValueError(f"{name}: expected at least one token, found none")
                wrong = [i for i in (min(ids), max(ids)) if not 0 <= i < vocabulary]
                if wrong:
                    raise ValueError(f"{name}: found token {wrong[0]}, but the model has tokens 0 to {vocabulary - 1}")

    # --- state -----------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Everything an exact resume needs, into an empty or new folder (CheckpointStore makes it atomic)."""
        state.save(self, Path(folder))

    def load(self, folder: str | Path) -> None:
        """Raises CheckpointError for a damaged checkpoint or one of something else; the policy is then unusable."""
        state.load(self, Path(folder))

    def export(self, folder: str | Path) -> None:
        """A plain transformers folder: weights in the training dtype, config, generation config, tokenizer."""
        state.export(self, Path(folder))
