"""The function that verl's fused-kernel switch calls, from rise_kernels. Written for verl 0.9.1.

    actor_rollout_ref.model.external_lib=rise_rl.integrations.verl_external_lib
    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.model.fused_kernel_options.impl_backend=triton

verl imports `external_lib` in every worker, where it calls `install()`. Any device works: the backend is chosen by
where the tensors are. verl computes its loss from the log-probs, so this costs 8 N V D FLOPs, as its own kernel does.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup, get_world_size

from rise_kernels import linear_logprob


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | None = 1.0,
    reduction: str | None = "none",
    dist_process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy) of the labels, float32 [N], as `verl.utils.kernel.linear_cross_entropy` returns them.

    hidden [..., D] and labels int64 [...] are flattened to N rows; weight [V, D]; labels of -100 give 0.
    Differentiable through both. Raises ValueError for a reduction other than "none" and for a vocabulary split over a
    process group.
    """
    if reduction != "none":
        raise ValueError(f"reduction: expected 'none', found {reduction!r}")
    if dist_process_group is not None and get_world_size(dist_process_group) > 1:
        raise ValueError(
            "dist_process_group: a vocabulary split over ranks is not supported; expected one rank or None"
        )
    if temperature is None:
        raise ValueError("temperature: expected a number > 0, found None")
    rows = hidden.reshape(-1, hidden.shape[-1])
    stats = linear_logprob(rows, weight, labels.reshape(-1), temperature=float(temperature), with_entropy=True)
    assert stats.entropy is not None
    return stats.logprob, stats.entropy


def install() -> None:
    """Puts `linear_cross_entropy` where verl's models look it up (with `impl_backend=triton`), in this process.

    Raises RuntimeError if verl's own function takes other arguments than the one this was written for. The Megatron
    models look it up when they are imported: install before that.
    """
    target = _verls_module()
    own = target.LinearCrossEntropy.forward
    theirs, ours = list(signature(own).parameters)[1:], list(signature(linear_cross_entropy).parameters)
    if theirs != ours:
        raise RuntimeError(
            f"verl.utils.kernel.linear_cross_entropy: expected the arguments {', '.join(ours)}, "
            f"found {', '.join(theirs)}"
        )
    target.linear_cross_entropy = linear_cross_entropy


def _verls_module() -> Any:
    from verl.utils.kernel import linear_cross_entropy as module

    return module
