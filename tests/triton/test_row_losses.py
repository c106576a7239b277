"""The row kernel's token losses equal `token_losses`, on every option, with NaN where a row does not use a value."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rise_kernels.token_losses import LossSpec, TokenLosses, TokenRows, token_losses
from tests.triton.on_device import DEVICE, row_kernel

pytestmark = pytest.mark.slow

FINITE = {"allow_nan": False, "allow_infinity": False, "width": 32}
LOGPROBS = st.one_of(
    st.sampled_from([0.0, -1e-7, -1e-3, -0.7, -20.0, -50.0, -200.0]), st.floats(min_value=-60, max_value=0, **FINITE)
)
# Log-ratios: none, near a clip bound, at the safety bound, far beyond it.
SHIFTS = st.one_of(st.sampled_from([0.0, 0.1, -0.1, 20.0, -20.0, 300.0, -300.0]), st.floats(-3, 3, **FINITE))
ROW = st.fixed_dictionaries(
    {
        "logprob": LOGPROBS,
        "old": SHIFTS,
        "ref": SHIFTS,
        "behaviour": SHIFTS,
        "advantage": st.one_of(st.sampled_from([0.0, 1.0, -1.0]), st.floats(-5, 5, **FINITE)),
        "weight": st.floats(2.0**-20, 4, **FINITE),
        "guide": st.booleans(),
    }
)
SPEC = st.builds(
    LossSpec,
    gamma=st.sampled_from([1e-8, 0.1, 10.0]),
    clip_low=st.sampled_from([0.0, 0.2, 1.0]),
    clip_high=st.sampled_from([0.0, 0.28, 3.0]),
    dual_clip=st.sampled_from([None, 1.5, 3.0]),
    kl_coef=st.sampled_from([0.0, 0.3]),
    kl_estimator=st.sampled_from(["k1", "k2", "k3", "k3_ratio"]),
    is_cap=st.sampled_from([None, 1.0, 2.0]),
    guide=st.sampled_from(["log_support", "support", "logprob"]),
)


def column(rows, name):
    return torch.tensor([row[name] for row in rows], dtype=torch.float32, device=DEVICE)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(ROW, min_size=1, max_size=40),
    spec=SPEC,
    has=st.fixed_dictionaries({name: st.booleans() for name in ("policy", "old", "ref", "behaviour")}),
)
def test_row_kernel_equals_token_losses(rows, spec, has):
    guide = torch.tensor([row["guide"] for row in rows], device=DEVICE)
    logprob = row_kernel(column(rows, "logprob"), TokenRows(column(rows, "weight"), guide), spec)[0]

    def near(name, there):
        value = logprob - column(rows, name)
        return torch.where(guide, torch.nan, value) if there and has["policy"] else None

    inputs = TokenRows(
        token_weight=column(rows, "weight"),
        is_guide=guide,
        advantage=torch.where(guide, torch.nan, column(rows, "advantage")) if has["policy"] else None,
        old_logprob=near("old", has["old"]),
        ref_logprob=near("ref", has["ref"] or spec.kl_coef != 0),
        behaviour_logprob=near("behaviour", has["behaviour"] or spec.is_cap is not None),
    )
    if not has["policy"]:
        inputs = TokenRows(inputs.token_weight, torch.ones_like(guide))
    expected = token_losses(logprob, inputs, spec)
    # exp may differ in its last bit: off a bound by that little, either branch is right
    for bound in (1 - spec.clip_low, 1 + spec.clip_high):
        assume(not ((expected.ratio != 1) & ((expected.ratio / bound - 1).abs() < 1e-5)).any())
    if spec.dual_clip is not None:
        assume(not ((expected.ratio / spec.dual_clip - 1).abs() < 1e-5).any())
    assert_row_kernel_gives(expected, column(rows, "logprob"), inputs, spec)


def assert_row_kernel_gives(expected, given, inputs, spec):
    logprob, found, own, other = row_kernel(given, inputs, spec)
    for name in TokenLosses._fields:
        x, y = getattr(found, name), getattr(expected, name)
        if name == "clipped":
            assert torch.equal(x, y)
        elif y is not None:
            torch.testing.assert_close(x, y, rtol=3e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    coefficient = inputs.token_weight * expected.dloss
    torch.testing.assert_close(-other, coefficient, rtol=3e-5, atol=1e-6)
    torch.testing.assert_close(own, coefficient * -torch.expm1(logprob), rtol=3e-5, atol=2e-6)


@pytest.mark.parametrize(
    "spec",
    [
        LossSpec(kl_coef=0.3, kl_estimator="k1", dual_clip=1.5),
        LossSpec(kl_coef=0.3, kl_estimator="k2", is_cap=2.0, guide="support"),
        LossSpec(kl_coef=0.3, kl_estimator="k3", dual_clip=3.0, is_cap=1.0, guide="logprob"),
        LossSpec(kl_coef=0.3, kl_estimator="k3_ratio", gamma=1e-8),
    ],
    ids=lambda spec: spec.kl_estimator,
)
def test_row_kernel_in_every_branch(spec):
    """What drawn rows may miss: each log-ratio beyond each bound, with either sign of the advantage."""
    old, advantage, ref, guide = torch.meshgrid(
        torch.tensor([0.0, 0.1, -0.1, 0.6, -0.6, 1.5, 19.5, -19.5, 20.5, -20.5, 300.0, -300.0]),
        torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([0.0, 0.7, -0.7, 20.5, -20.5]), torch.tensor([0.0, 0.0, 1.0]),
        indexing="ij",
    )  # fmt: skip
    old, advantage, ref, guide = (x.flatten().to(DEVICE) for x in (old, advantage, ref, guide == 1))
    weight = torch.linspace(0.5, 2, len(old), device=DEVICE)
    given = torch.where(torch.arange(len(old), device=DEVICE) % 2 == 0, -0.7, -30.0)
    logprob = row_kernel(given, TokenRows(weight, guide), spec)[0]
    inputs = TokenRows(weight, guide, advantage, logprob - old, logprob - ref, logprob - old - 2 * ref)
    assert_row_kernel_gives(token_losses(logprob, inputs, spec), given, inputs, spec)


@pytest.mark.parametrize("gamma", [1e-8, 0.1, 10.0])
@pytest.mark.parametrize("logprob", [0.0, -1e-7, -50.0, -200.0])
def test_guide_loss_at_the_ends_against_float64(gamma, logprob):
    rows = TokenRows(torch.ones(1, device=DEVICE), torch.ones(1, dtype=torch.bool, device=DEVICE))
    logp, found, _, _ = row_kernel(torch.tensor([logprob], device=DEVICE), rows, LossSpec(gamma=gamma))
    p = math.exp(logp.item())
    assert logp.item() == pytest.approx(logprob, rel=1e-6, abs=1e-9)
    # log(1 + gamma / p), with log p as it is: p itself may underflow
    x = math.log(gamma) - logp.item()
    assert found.loss.item() == pytest.approx(max(x, 0.0) + math.log1p(math.exp(-abs(x))), rel=1e-6)
    assert found.dloss.item() == pytest.approx(-gamma / (p + gamma), rel=1e-6)
    assert found.support.item() == pytest.approx(math.exp(-x) / (1 + math.exp(-x)), rel=2e-5)
