"""Errors come before any product and name the argument, what was found and what was expected."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import rise_kernels
from rise_kernels import Options
from tests.kernels.backends import BACKENDS
from tests.kernels.launches import triton_launches

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

N, D, V = 6, 8, 20


def call(backend, **changes):
    arguments = {
        "hidden": torch.zeros(N, D), "weight": torch.zeros(V, D), "target": torch.zeros(N, dtype=torch.int64),
        "token_weight": torch.ones(N), "advantage": torch.ones(N), "is_guide": torch.zeros(N, dtype=torch.bool),
    } | changes  # fmt: skip
    return rise_kernels.linear_rise_loss(backend=backend, **arguments)


def fake_zero3_weight():
    weight = nn.Parameter(torch.empty(0))
    weight.ds_id = 7
    return weight


class LoraHead(nn.Linear):
    def __init__(self):
        super().__init__(D, V, bias=False)
        self.lora_A = nn.Linear(D, 2)
        self.lora_B = nn.Linear(2, V)


WRONG = {
    "hidden is 3-D": (
        {"hidden": torch.zeros(2, 3, D)},
        ValueError,
        r"hidden: expected shape \[N, D\], found \[2, 3, 8",
    ),
    "D differs": ({"hidden": torch.zeros(N, 9)}, ValueError, r"hidden \[6, 9\] and weight \[20, 8\].*same D"),
    "hidden is double": ({"hidden": torch.zeros(N, D).double()}, TypeError, r"hidden: expected dtype.*float64"),
    "hidden is a list": ({"hidden": [[0.0] * D] * N}, TypeError, r"hidden: expected a tensor, found list"),
    "types differ": ({"weight": torch.zeros(V, D).half()}, TypeError, r"hidden \(torch.float32\) and weight \(torch.f"),
    "weight is int8": ({"weight": torch.zeros(V, D, dtype=torch.int8)}, TypeError, r"weight: expected dtype.*int8"),
    "weight is sharded": (
        {"weight": fake_zero3_weight()},
        ValueError,
        r"weight: .*found \[0\]; it looks sharded.*gather",
    ),
    "weight is flat": ({"weight": torch.zeros(V * D)}, ValueError, r"weight: expected.*\[160\].*sharded"),
    "weight is empty": ({"weight": torch.zeros(0, D)}, ValueError, r"weight: expected.*found \[0, 8\]"),
    "weight is a module": (
        {"weight": nn.Linear(D, V)},
        TypeError,
        r"weight: expected a tensor, found the module Linear",
    ),
    "weight is a LoRA head": ({"weight": LoraHead()}, TypeError, r"weight: .*adapter.*merge it"),
    "bias": ({"bias": torch.zeros(V + 1)}, ValueError, r"bias: expected shape \[V\] = \[20\], found \[21\]"),
    "target type": ({"target": torch.zeros(N, dtype=torch.int32)}, TypeError, r"target: expected dtype int64.*int32"),
    "target length": ({"target": torch.zeros(N + 1, dtype=torch.int64)}, ValueError, r"target: .*\[6\].*found \[7\]"),
    "target too large": (
        {"target": torch.tensor([0, 1, 2, V, 4, V])},
        ValueError,
        r"target: .*\[0, 20\).*found 20 at row 3 \(2 of 6",
    ),
    "target negative": ({"target": torch.tensor([0, -1, -100, 1, 2, 3])}, ValueError, r"target: .*found -1 at row 1"),
    "target device": (
        {"target": torch.zeros(N, dtype=torch.int64, device="meta")},
        ValueError,
        r"target: expected device cpu.*meta",
    ),
    "token_weight length": (
        {"token_weight": torch.ones(5)},
        ValueError,
        r"token_weight: expected shape \[N\] = \[6\].*\[5\]",
    ),
    "token_weight shape": ({"token_weight": torch.ones(N, 1)}, ValueError, r"token_weight: .*found \[6, 1\]"),
    "token_weight missing": ({"token_weight": None}, TypeError, r"token_weight: expected a float tensor"),
    "token_weight type": (
        {"token_weight": torch.ones(N, dtype=torch.int64)},
        TypeError,
        r"token_weight: expected a float",
    ),
    "advantage missing": ({"advantage": None}, TypeError, r"advantage: expected a float tensor"),
    "advantage length": ({"advantage": torch.ones(7)}, ValueError, r"advantage: .*found \[7\]"),
    "is_guide type": ({"is_guide": torch.zeros(N)}, TypeError, r"is_guide: expected dtype bool"),
    "is_guide missing": ({"is_guide": None}, TypeError, r"is_guide: expected a tensor, found NoneType"),
    "old_logprob length": ({"old_logprob": torch.zeros(1)}, ValueError, r"old_logprob: .*found \[1\]"),
    "ref_logprob missing": ({"kl_coef": 0.1}, ValueError, r"ref_logprob: .*kl_coef is 0.1"),
    "behaviour missing": ({"is_cap": 2.0}, ValueError, r"behaviour_logprob: .*is_cap is 2.0"),
    "temperature 0": ({"temperature": 0}, ValueError, r"temperature: expected a finite number > 0, found 0"),
    "temperature nan": ({"temperature": float("nan")}, ValueError, r"temperature: .*nan"),
    "temperature text": ({"temperature": "1"}, ValueError, r"temperature: .*'1'"),
    "softcap": ({"softcap": 0.0}, ValueError, r"softcap: .*0.0"),
    "gamma": ({"gamma": 0.0}, ValueError, r"gamma: .*0.0"),
    "gamma negative": ({"gamma": -1}, ValueError, r"gamma: .*-1"),
    "guide": ({"guide": "entropy"}, ValueError, r"guide: expected one of log_support, .*'entropy'"),
    "clip_low": ({"clip_low": 1.5}, ValueError, r"clip_low: .*1.5"),
    "clip_high": ({"clip_high": -0.1}, ValueError, r"clip_high: .*-0.1"),
    "dual_clip": ({"dual_clip": 1.0}, ValueError, r"dual_clip: .*1.0"),
    "kl_coef": ({"kl_coef": -0.1}, ValueError, r"kl_coef: .*-0.1"),
    "kl_estimator": ({"kl_estimator": "k4"}, ValueError, r"kl_estimator: .*'k4'"),
    "is_cap": ({"is_cap": 0.0}, ValueError, r"is_cap: .*0.0"),
    "ignore_index": ({"ignore_index": 1.0}, TypeError, r"ignore_index: .*1.0"),
    "options": ({"options": {"budget": 5}}, TypeError, r"options: .*dict"),
    "budget": ({"options": Options(budget=0)}, ValueError, r"options.budget: .*0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_message(backend, name):
    changes, kind, message = WRONG[name]
    error = pytest.raises(kind, match=f"(?s){message}")
    with FlopCounterMode(display=False) as flops, triton_launches() as launches, error:
        call(backend, **changes)
    assert flops.get_total_flops() == 0
    assert not launches.gemms


def test_the_right_call_passes(backend):
    assert call(backend).loss.isfinite()


def test_dtensor_weight(backend, process_group):
    """A sharded DTensor would otherwise give the loss of one shard of the vocabulary."""
    distributed = pytest.importorskip("torch.distributed.tensor")
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    weight = distributed.distribute_tensor(torch.zeros(V, D), mesh, [distributed.Shard(0)])
    with pytest.raises(TypeError, match=r"weight: expected a plain tensor, found a DTensor.*full_tensor"):
        call(backend, weight=weight)


def test_other_functions_check_too(backend):
    hidden, weight, target = torch.zeros(N, D), torch.zeros(V, D), torch.full((N,), V)
    for function, more in (
        (rise_kernels.linear_logprob, ()),
        (rise_kernels.linear_guide_loss, (torch.ones(N),)),
        (rise_kernels.linear_policy_loss, (torch.ones(N), torch.ones(N))),
    ):
        with pytest.raises(ValueError, match=r"target: .*found 20 at row 0"):
            function(hidden, weight, target, *more, backend=backend)
        with pytest.raises(ValueError, match="temperature"):
            function(hidden, weight, target, *more, temperature=0, backend=backend)


def test_unknown_backend(backend):
    with pytest.raises(ValueError, match="backend: expected one of auto, reference, chunked, triton, found 'cuda'"):
        call("cuda")
