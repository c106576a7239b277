"""The losses under DistributedDataParallel: its gradient hooks see what plain autograd sees."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rise_kernels
from tests.kernels.backends import BACKENDS
from tests.kernels.calls import random_case, with_old_logprobs


class Model(nn.Module):
    """A trunk, and a head whose weight only the loss reads."""

    def __init__(self, depth, vocab, backend):
        super().__init__()
        self.trunk = nn.Linear(depth, depth)
        self.head = nn.Linear(depth, vocab, bias=False)
        self.backend = backend

    def forward(self, case):
        return rise_kernels.linear_rise_loss(
            self.trunk(case.hidden), self.head.weight, case.target, case.token_weight, case.advantage, case.is_guide,
            case.old_logprob, backend=self.backend,
        ).loss  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_under_ddp(backend, process_group):
    case = with_old_logprobs(random_case(kind="rise"))
    torch.manual_seed(0)
    model = Model(case.hidden.shape[1], case.weight.shape[0], backend)
    wrapped = nn.parallel.DistributedDataParallel(model)
    grads = []
    for run in (model, wrapped):
        model.zero_grad()
        for _ in range(2):  # gradient accumulation too
            run(case).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(g.any() for g in grads[0])
    for plain, reduced in zip(*grads):
        assert torch.equal(plain, reduced)
