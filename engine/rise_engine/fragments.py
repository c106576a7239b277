"""The optimizer's state on this rank, parameter by parameter, whatever the ZeRO stage.

DeepSpeed splits float32 master weights and Adam's moments over ranks in a way that depends on stage and rank count.
Here each rank's share is told as fragments [start, start + n) of flattened parameters, so that a checkpoint of them can
be read by another number of ranks, or under another stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .policy import PolicyEngine

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Fragment:
    """n elements from `start` of the flattened parameter `name`, which this rank holds at `offset` of a flat master.

    whole: every rank holds this one (ZeRO stage 0); else ranks hold fragments that do not overlap.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    n: int
    master: Tensor
    offset: int
    whole: bool

    def of(self, flat: Tensor) -> Tensor:
        """The fragment's part of a tensor laid out as the master is: a view [n]."""
        return flat.detach().view(-1).narrow(0, self.offset, self.n)

    def part(self, rank: int, world_size: int) -> Fragment:
        """What of it rank `rank` saves: all, or an even slice where every rank holds the same."""
        if not self.whole:
            return self
        size = -(-self.n // world_size)
        begin, end = min(rank * size, self.n), min((rank + 1) * size, self.n)
        return Fragment(self.name, self.shape, begin, end - begin, self.master, self.offset + begin, True)


def fragments(policy: PolicyEngine) -> Iterator[Fragment]:
    """What this rank holds of every trained parameter, in the model's order; none of a parameter it has no part of."""
    stage = policy.engine.zero_optimization_stage()
    held = {0: _whole, 1: _of_flat_groups, 2: _of_flat_groups, 3: _of_partitions}[stage]
    for name, parameter in policy.model.named_parameters():
        if parameter.requires_grad:
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            found = held(policy.engine.optimizer, parameter)
            if found is not None:
                yield Fragment(name, shape, *found, whole=stage == 0)


def _whole(optimizer: Any, parameter: Any) -> tuple[int, int, Tensor, int]:
    return 0, parameter.numel(), parameter, 0


def _of_flat_groups(optimizer: Any, parameter: Any) -> tuple[int, int, Tensor, int] | None:
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    master = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
    here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
    return here.start, there.numel, master, there.start


def _of_partitions(optimizer: Any, parameter: Any) -> tuple[int, int, Tensor, int] | None:
    group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = size * optimizer._get_param_partition_rank(parameter)
    n = min(size, parameter.ds_numel - start)  # the last partition is padded
    return (start, n, optimizer.fp32_partitioned_groups_flat[group], offset) if n > 0 else None


def adam(policy: PolicyEngine) -> torch.optim.Optimizer:
    """The optimizer that holds the moments: DeepSpeed's own wraps it, except under stage 0."""
    return (
        policy.engine.optimizer if policy.engine.zero_optimization_stage() == 0 else policy.engine.optimizer.optimizer
    )


def updates(optimizer: torch.optim.Optimizer, master: Tensor) -> int:
    """How often Adam has updated `master`: what its bias correction counts."""
    return int(optimizer.state[master]["step"]) if "step" in optimizer.state.get(master, {}) else 0


def start_state(optimizer: torch.optim.Optimizer, master: Tensor, count: int) -> None:
    """Moments of zero after `count` updates, in the form that the optimizer makes at its first step."""
    fused = isinstance(optimizer, torch.optim.AdamW)
    optimizer.state[master] = {
        "step": torch.tensor(float(count), device=master.device) if fused else count,
        **{key: torch.zeros_like(master, memory_format=torch.preserve_format) for key in MOMENTS},
    }
    if hasattr(optimizer, "ds_opt_adam"):
        _recount(optimizer, count)


def _recount(optimizer: Any, count: int) -> None:
    """DeepSpeed's CPU Adam keeps powers of its betas beside its state, multiplied on in float32 at every update, but
    begins with exact ones: without the updates gone by (of nothing, here), a resumed run would round differently.
    """
    nothing = torch.empty(0)
    group = optimizer.param_groups[0]
    rest = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
    for step in range(1, count + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, *rest, *[nothing] * 4)


def renew_weights(policy: PolicyEngine) -> None:
    """The weights that forward passes use, from the masters. Collective under ZeRO."""
    optimizer, stage = policy.engine.optimizer, policy.engine.zero_optimization_stage()
    if stage in (1, 2):
        optimizer.update_lp_params()
    elif stage == 3:
        optimizer.checkpoint_event_prologue()
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.checkpoint_event_epilogue()
