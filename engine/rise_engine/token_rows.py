"""A micro-batch's per-token inputs to the loss, and what its results say about the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rise_kernels.results import RiseLoss
from rise_kernels.token_losses import LossSpec, TokenRows

from .packing import MicroBatch
from .sequences import TrainSequence

NAN = float("nan")


def can_matter(sequence: TrainSequence, spec: LossSpec) -> bool:
    """False if the sequence's gradient is exactly 0, so that there is nothing to forward it for."""
    if sequence.token_weight == 0:
        return False
    return sequence.is_guide or sequence.advantage != 0 or spec.kl_coef != 0


def check_consistent(sequences: Sequence[TrainSequence], spec: LossSpec) -> None:
    """A log-prob that some natural sequences carry and others lack is a mistake of the caller, never a default."""
    natural = [s for s in sequences if not s.is_guide]
    for name in ("old_logprob", "ref_logprob", *(("behaviour_logprob",) if spec.is_cap is not None else ())):
        missing = [s.uid for s in natural if getattr(s, name) is None]
        if missing and (len(missing) < len(natural) or name == "behaviour_logprob"):
            raise ValueError(
                f"{name}: missing for {len(missing)} of {len(natural)} natural sequences (first: {missing[0]!r})"
            )
    if spec.kl_coef and any(s.ref_logprob is None for s in natural):
        raise ValueError("ref_logprob: the loss has a KL term, so every natural sequence needs reference log-probs")


def make_rows(
    batch: MicroBatch, sequences: Sequence[TrainSequence], spec: LossSpec, *, scale: float, device: torch.device
) -> TokenRows:
    """Per-token vectors in the order of `batch.target`, token weights times `scale`."""
    chosen = [sequences[i] for i in batch.members]

    def constant(values: Sequence[float]) -> Tensor:
        pieces = torch.tensor(values, dtype=torch.float32)
        return pieces.repeat_interleave(torch.tensor(batch.lengths)).to(device)

    def per_token(name: str, *, needed: bool = False) -> Tensor | None:
        """None where no row has the value; `needed`: NaN there, as a batch of guide rows alone needs none."""
        if not needed and all(getattr(s, name) is None for s in chosen):
            return None
        return concatenated(chosen, name).to(device)

    return TokenRows(
        token_weight=constant([s.token_weight * scale for s in chosen]),
        is_guide=constant([s.is_guide for s in chosen]).bool(),
        advantage=constant([NAN if s.is_guide else s.advantage for s in chosen]),
        old_logprob=per_token("old_logprob"),
        ref_logprob=per_token("ref_logprob", needed=spec.kl_coef != 0),
        behaviour_logprob=per_token("behaviour_logprob", needed=True) if spec.is_cap is not None else None,
    )


def concatenated(sequences: Sequence[TrainSequence], name: str) -> Tensor:
    """float32 over all tokens of the sequences, NaN where a sequence has no values."""
    lists = [getattr(s, name) for s in sequences]
    return torch.cat(
        [
            torch.full((len(s.response_ids),), NAN) if values is None else torch.as_tensor(values, dtype=torch.float32)
            for s, values in zip(sequences, lists)
        ]
    )


@dataclass
class StepStatistics:
    """Collects what the forward passes report; nothing leaves the device until `summary`."""

    device: torch.device
    is_cap: float | None = None
    losses: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    batches: list[tuple[MicroBatch, Tensor]] = field(default_factory=list)

    def add(self, batch: MicroBatch, rows: TokenRows, sequences: Sequence[TrainSequence], result: RiseLoss) -> None:
        """`result` must be detached. Rows of weight 0 were not computed and do not count."""
        self.losses.append(torch.stack([result.loss, result.policy_loss, result.guide_loss]).double())
        self.batches.append((batch, result.token_loss))
        members = [sequences[i] for i in batch.members]
        behaviour = concatenated(members, "behaviour_logprob").to(self.device)
        coupled = torch.cat([torch.full((len(s.response_ids),), s.coupled) for s in members]).to(self.device)
        assert result.entropy is not None
        # After an update the policy has moved on purpose; the gap is that of the weights that sampled.
        old = rows.old_logprob
        at_sampling = result.logprob if old is None else torch.where(old.isnan(), result.logprob, old)
        columns = [
            rows.is_guide,
            ~rows.is_guide & ~coupled,
            result.entropy,
            result.ratio,
            result.clipped,
            result.support,
            torch.full_like(result.logprob, NAN) if result.kl is None else result.kl,
            at_sampling - behaviour,
        ]
        table = torch.stack([c.float() for c in columns], dim=1)
        self.tokens.append(table[rows.token_weight != 0])

    def non_finite(self, sequences: Sequence[TrainSequence]) -> list[str]:
        """The uids of sequences with a token loss that is NaN or infinite."""
        uids = []
        for batch, token_loss in self.batches:
            for i, values in zip(batch.members, token_loss.split(list(batch.lengths))):
                if not values.isfinite().all():
                    uids.append(sequences[i].uid)
        return uids

    def total_loss(self) -> list[float]:
        """loss, policy loss and guide loss, summed over micro-batches and ranks."""
        total = torch.stack(self.losses).sum(0) if self.losses else torch.zeros(3, dtype=torch.float64).to(self.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total.tolist()

    def summary(self) -> dict[str, Any]:
        table = torch.cat(self.tokens) if self.tokens else torch.zeros(0, 8, device=self.device)
        guide, natural, entropy, ratio, clipped, support, kl, gap = _gathered(table).cpu().double().unbind(1)
        guide, natural = guide.bool(), natural.bool()
        gap = gap[~gap.isnan()]
        kept = torch.empty(0) if self.is_cap is None else gap <= math.log(self.is_cap)
        gap = gap.abs()
        return {
            "tokens": len(guide),
            "natural_tokens": int(natural.sum()),
            "guide_tokens": int(guide.sum()),
            "gap_tokens": len(gap),
            "clip_fraction": _mean(clipped[natural]),
            "mean_support": _mean(support[guide]),
            "entropy": _mean(entropy[natural]),
            "ratio_mean": _mean(ratio[natural]),
            "ratio_max": ratio[natural].max().item() if natural.any() else NAN,
            "kl": _mean(kl[natural]),
            "logprob_gap_mean": _mean(gap),
            "logprob_gap_p99": _quantile(gap, 0.99),
            "importance_kept": _mean(kept.double()),
            "logprob_gap_max": gap.max().item() if len(gap) else NAN,
        }


def _mean(values: Tensor) -> float:
    return values.mean().item() if len(values) else NAN


def _quantile(values: Tensor, q: float) -> float:
    """The smallest value that at least q of them do not exceed (torch.quantile stops at 16 million)."""
    return values.kthvalue(math.ceil(q * len(values))).values.item() if len(values) else NAN


def _gathered(table: Tensor) -> Tensor:
    """The rows of every rank."""
    if dist.get_world_size() == 1:
        return table
    counts = [torch.zeros(1, dtype=torch.long, device=table.device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([len(table)], device=table.device))
    most = max(int(c) for c in counts)
    padded = torch.nn.functional.pad(table, (0, 0, 0, most - len(table)))
    tables = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(tables, padded)
    return torch.cat([t[: int(c)] for t, c in zip(tables, counts)])
