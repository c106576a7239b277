"""Triton launches on the current device: every launch is made while that is the tensors' own."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import rise_kernels
from rise_kernels.triton_backend.launch import Kernels
from tests.kernels.calls import call, random_case
from tests.triton.on_device import interpreted

pytestmark = [pytest.mark.slow, interpreted]


def test_every_launch_is_on_the_tensors_device(monkeypatch):
    current, launched = [None], []

    @contextmanager
    def device_of(x):
        current.append(x.data_ptr())
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)

    def watched(name):
        original = getattr(Kernels, name)

        def launch(self, *args, **keywords):
            launched.append((name, current[-1] == self.head.hidden.data_ptr()))
            return original(self, *args, **keywords)

        return launch

    names = {"forward", "backward", "statistics", "losses", "dlogits"}
    for name in names:
        monkeypatch.setattr(Kernels, name, watched(name))
    case = random_case(kind="rise")
    call(case, "triton")[0].loss.backward()
    hidden = case.hidden.requires_grad_()
    rise_kernels.linear_logprob(hidden, case.weight, case.target, backend="triton").logprob.sum().backward()
    assert {name for name, _ in launched} == names
    assert all(inside for _, inside in launched)
