"""Everything that can be wrong with the arguments, found before any launch and without a host sync.

(The range of the targets is checked in `rows.plan_rows`, where the call's one host sync is.)
"""

from __future__ import annotations

import math
import sys
from typing import Any, get_args

import torch
from torch import Tensor

from .backend import Options
from .token_losses import GuideKind, KlEstimator, LossSpec, check_gamma

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KL_ESTIMATORS = get_args(KlEstimator)
GUIDES = get_args(GuideKind)


def check_head(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
    options: Options | None,
) -> None:
    """Raise TypeError or ValueError, naming the argument, what was found and what was expected."""
    for name, x in (("hidden", hidden), ("weight", weight), ("target", target), ("bias", bias)):
        if name == "bias" and x is None:
            continue
        check_tensor(name, x)
    _check_weight(weight)
    if hidden.ndim != 2:
        raise ValueError(
            f"hidden: expected shape [N, D], found {_shape(hidden)}; flatten the batch and sequence dimensions first"
        )
    if hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {_shape(hidden)} and weight {_shape(weight)}: expected [N, D] and [V, D] with the same D"
        )
    if target.dtype != torch.int64:
        raise TypeError(f"target: expected dtype int64, found {target.dtype}")
    _check_length("target", target, hidden)
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if x is not None and x.dtype not in DTYPES:
            raise TypeError(f"{name}: expected dtype float32, bfloat16 or float16, found {x.dtype}")
    autocast = torch.is_autocast_enabled(hidden.device.type)
    if not autocast and hidden.dtype != weight.dtype:
        raise TypeError(
            f"hidden ({hidden.dtype}) and weight ({weight.dtype}): expected the same dtype outside autocast"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias: expected shape [V] = [{weight.shape[0]}], found {_shape(bias)}")
    for name, x in (("weight", weight), ("target", target), ("bias", bias)):
        _check_device(name, x, hidden)
    if not _is_number(temperature) or not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature: expected a finite number > 0, found {temperature!r} (greedy decoding has no log-probs)"
        )
    if softcap is not None and (not _is_number(softcap) or not 0 < softcap < math.inf):
        raise ValueError(f"softcap: expected a finite number > 0 or None, found {softcap!r}")
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise TypeError(f"ignore_index: expected an int, found {ignore_index!r}")
    if options is not None:
        if not isinstance(options, Options):
            raise TypeError(f"options: expected rise_kernels.Options or None, found {type(options).__name__}")
        if not isinstance(options.budget, int) or options.budget <= 0:
            raise ValueError(f"options.budget: expected a number of bytes > 0, found {options.budget!r}")


def check_spec(spec: LossSpec) -> None:
    check_gamma(spec.gamma)
    if spec.guide not in GUIDES:
        raise ValueError(f"guide: expected one of {', '.join(GUIDES)}, found {spec.guide!r}")
    if not _is_number(spec.clip_low) or not 0 <= spec.clip_low <= 1:
        raise ValueError(f"clip_low: expected a number in [0, 1], found {spec.clip_low!r}")
    if not _is_number(spec.clip_high) or not spec.clip_high >= 0:
        raise ValueError(f"clip_high: expected a number >= 0, found {spec.clip_high!r}")
    if spec.dual_clip is not None and (not _is_number(spec.dual_clip) or not spec.dual_clip > 1):
        raise ValueError(f"dual_clip: expected a number > 1 or None, found {spec.dual_clip!r}")
    if not _is_number(spec.kl_coef) or not 0 <= spec.kl_coef < math.inf:
        raise ValueError(f"kl_coef: expected a finite number >= 0, found {spec.kl_coef!r}")
    if spec.kl_estimator not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator: expected one of {', '.join(KL_ESTIMATORS)}, found {spec.kl_estimator!r}")
    if spec.is_cap is not None and (not _is_number(spec.is_cap) or not spec.is_cap > 0):
        raise ValueError(f"is_cap: expected a number > 0 or None, found {spec.is_cap!r}")


def check_rows(hidden: Tensor, spec: LossSpec, *, is_guide: Tensor | None = None, **vectors: Tensor | None) -> None:
    """vectors: the per-token float arguments by name; None where not given."""
    for name, x in vectors.items():
        if x is None and name in ("token_weight", "advantage"):
            raise TypeError(f"{name}: expected a float tensor [N], found None")
        if x is None:
            continue
        check_tensor(name, x)
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name}: expected a float dtype, found {x.dtype}")
        _check_length(name, x, hidden)
        _check_device(name, x, hidden)
    if is_guide is not None:
        check_tensor("is_guide", is_guide)
        if is_guide.dtype != torch.bool:
            raise TypeError(f"is_guide: expected dtype bool, found {is_guide.dtype}")
        _check_length("is_guide", is_guide, hidden)
        _check_device("is_guide", is_guide, hidden)
    if spec.kl_coef and vectors.get("ref_logprob") is None:
        raise ValueError(f"ref_logprob: expected a float tensor [N] because kl_coef is {spec.kl_coef}, found None")
    if spec.is_cap is not None and vectors.get("behaviour_logprob") is None:
        raise ValueError(f"behaviour_logprob: expected a float tensor [N] because is_cap is {spec.is_cap}, found None")


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _shape(x: Tensor) -> str:
    return str(list(x.shape))


def check_tensor(name: str, x: Any) -> None:
    if isinstance(x, torch.nn.Module):
        hint = ""
        if hasattr(x, "base_layer") or any("lora_" in key for key, _ in x.named_parameters()):
            hint = "; it is wrapped by an adapter (LoRA): merge it, or pass base weight + scaled B @ A as the weight"
        raise TypeError(f"{name}: expected a tensor, found the module {type(x).__name__}{hint}")
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, found {type(x).__name__}")
    # Looked up, not imported: torch.distributed.tensor is heavy, and a DTensor exists only where it is loaded.
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(x, distributed.DTensor):
        raise TypeError(
            f"{name}: expected a plain tensor, found a DTensor of global shape {_shape(x)} with placements "
            f"{x.placements}; gather it first, for example with full_tensor()"
        )


def _check_weight(weight: Tensor) -> None:
    if weight.numel() == 0 or weight.ndim != 2:
        hint = ""
        if hasattr(weight, "ds_id") or weight.numel() == 0 or weight.ndim == 1:
            hint = (
                "; it looks sharded (ZeRO-3 and FSDP leave an empty or flat placeholder): gather it first, or call the "
                "loss from inside the module that owns it"
            )
        raise ValueError(f"weight: expected shape [V, D] with V, D > 0, found {_shape(weight)}{hint}")


def _check_length(name: str, x: Tensor, hidden: Tensor) -> None:
    if tuple(x.shape) != (hidden.shape[0],):
        raise ValueError(f"{name}: expected shape [N] = [{hidden.shape[0]}] (the rows of hidden), found {_shape(x)}")


def _check_device(name: str, x: Tensor | None, hidden: Tensor) -> None:
    if x is not None and x.device != hidden.device:
        raise ValueError(f"{name}: expected device {hidden.device} (that of hidden), found {x.device}")
