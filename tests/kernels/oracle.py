"""The losses of RISE-RL in float64, written out from the paper's equations on full logits and left to autograd.

Shares no code with rise_kernels. Rows are handled one mask at a time, so that NaN in unused values cannot spread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Case:
    """Inputs of a call in any dtype, and its options by keyword (gamma, clip_low, ..., temperature, softcap)."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    token_weight: Tensor
    advantage: Tensor | None = None
    is_guide: Tensor | None = None
    old_logprob: Tensor | None = None
    ref_logprob: Tensor | None = None
    behaviour_logprob: Tensor | None = None
    bias: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def vectors(self) -> dict[str, Tensor]:
        names = ("ref_logprob", "behaviour_logprob")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass
class Answer:
    loss: Tensor
    logprob: Tensor
    entropy: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor
    bias_grad: Tensor | None


def logits(hidden, weight, bias=None, temperature=1.0, softcap=None):
    z = hidden.double() @ weight.double().T
    if bias is not None:
        z = z + bias.double()
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature


def row_stats(z: Tensor, target: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, logsumexp, entropy), 0 on ignored rows."""
    kept = target != ignore_index
    log_p = torch.log_softmax(z, dim=-1)
    logprob = log_p.gather(1, target.where(kept, torch.zeros_like(target))[:, None])[:, 0]
    finite = log_p.masked_fill(torch.isinf(log_p), 0.0)
    entropy = -(log_p.exp() * finite).sum(-1)
    zero = torch.zeros_like(logprob)
    return logprob.where(kept, zero), torch.logsumexp(z, -1).where(kept, zero), entropy.where(kept, zero)


def policy_token_loss(
    logprob, advantage, old, ref, behaviour, clip_low, clip_high, dual_clip, kl_coef, kl_estimator, is_cap
):
    old = logprob.detach() if old is None else old.double()
    advantage = advantage.double()
    ratio = torch.exp(logprob - old)
    objective = torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        objective = torch.where(advantage < 0, torch.maximum(objective, dual_clip * advantage), objective)
    if behaviour is not None:
        correction = torch.exp(old - behaviour.double())
        objective = objective * (correction if is_cap is None else correction.clamp(max=is_cap)).detach()
    loss = -objective
    if ref is not None:
        log_r = logprob - ref.double()
        k3 = torch.exp(-log_r) - 1 + log_r
        kl = {"k1": log_r, "k2": log_r**2 / 2, "k3": k3, "k3_ratio": ratio * k3}[kl_estimator]
        loss = loss + kl_coef * kl
    return loss


def solve(case: Case) -> Answer:
    options = {
        "gamma": 0.1, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None, "kl_coef": 0.0, "kl_estimator": "k3",
        "is_cap": None, "guide": "log_support", "temperature": 1.0, "softcap": None, "ignore_index": -100,
    } | case.options  # fmt: skip
    hidden = case.hidden.detach().double().requires_grad_()
    weight = case.weight.detach().double().requires_grad_()
    bias = None if case.bias is None else case.bias.detach().double().requires_grad_()
    z = logits(hidden, weight, bias, options["temperature"], options["softcap"])
    logprob, _, entropy = row_stats(z, case.target, options["ignore_index"])
    counted = (case.target != options["ignore_index"]) & (case.token_weight != 0)
    n = case.target.shape[0]
    if case.is_guide is not None:
        guide = case.is_guide
    else:
        guide = torch.full((n,), case.advantage is None)
    loss = (hidden.sum() + weight.sum()) * 0 if bias is None else (hidden.sum() + weight.sum()) * 0 + bias[0] * 0

    rows = counted & guide
    p = logprob[rows].exp()
    # log(p + gamma) - log p, with log p as it is: p itself may underflow.
    token = {
        "log_support": torch.log(p + options["gamma"]) - logprob[rows],
        "support": -p / (p + options["gamma"]),
        "logprob": -logprob[rows],
    }[options["guide"]]
    loss = loss + (case.token_weight[rows].double() * token).sum()

    rows = counted & ~guide
    if rows.any():

        def some(x):
            return None if x is None else x[rows]

        names = ("clip_low", "clip_high", "dual_clip", "kl_coef", "kl_estimator", "is_cap")
        token = policy_token_loss(
            logprob[rows], some(case.advantage), some(case.old_logprob), some(case.ref_logprob),
            some(case.behaviour_logprob), **{name: options[name] for name in names},
        )  # fmt: skip
        loss = loss + (case.token_weight[rows].double() * token).sum()
    grads = torch.autograd.grad(loss, [hidden, weight] + ([] if bias is None else [bias]))
    zero = torch.zeros_like(logprob)
    return Answer(
        loss.detach(), logprob.detach().where(counted, zero), entropy.detach().where(counted, zero),
        grads[0], grads[1], grads[2] if bias is not None else None,
    )  # fmt: skip


def relative(found: Tensor, expected: Tensor, floor: float = 1e-300) -> float:
    """The largest error, relative to the expected tensor's largest entry (or to `floor`)."""
    return ((found.double() - expected).abs().max() / expected.abs().max().clamp_min(floor)).item()
