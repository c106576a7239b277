"""Every kernel test finds NaN in fresh memory, and runs the Triton kernels on the GPU where there is one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kernels.layouts import on_device

GPU = torch.cuda.is_available()


@pytest.fixture
def process_group():
    """torch.distributed with one process; an engine test of the same pytest process may have started it already."""
    ours = not torch.distributed.is_initialized()
    if ours:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    if ours:
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """What a kernel forgets to write, and what torch.empty happens to hold, must never look like a result."""

    def poison(make):
        def made(*args, **keywords):
            x = make(*args, **keywords)
            with torch.no_grad():  # torch 2.11's checkpoint asks for one that requires grad
                if not x.dtype.is_floating_point:
                    return x.fill_(True) if x.dtype == torch.bool else x
                return x.fill_(float("nan"))

        return made

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))


class _OnGpu:
    """A backend on CPU tensors whose work is done on the GPU: only what crosses `backend.Backend` is moved."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        method = getattr(self._backend, name)
        return lambda *args, **keywords: _moved(method(*_moved(args, "cuda"), **_moved(keywords, "cuda")), "cpu")


def _moved(x, device):
    if isinstance(x, torch.Tensor):
        return on_device(x, device)
    if isinstance(x, dict):
        return {key: _moved(value, device) for key, value in x.items()}
    if isinstance(x, tuple):
        values = [_moved(value, device) for value in x]
        return type(x)(*values) if hasattr(x, "_fields") else tuple(values)
    if dataclasses.is_dataclass(x):
        changes = {field.name: _moved(getattr(x, field.name), device) for field in dataclasses.fields(x)}
        return dataclasses.replace(x, **changes)
    return x


@pytest.fixture(autouse=True)
def kernels_on_the_gpu(request, monkeypatch):
    if not GPU or getattr(request.node, "callspec", None) is None:
        return
    if request.node.callspec.params.get("backend") != "triton":
        return
    if request.node.path.name == "test_kernel_cost.py":
        pytest.skip("counts bytes, the copies to the GPU among them: run on the interpreter")
    from rise_kernels import triton_backend

    monkeypatch.setattr(triton_backend, "backend", _OnGpu(triton_backend.backend))
    monkeypatch.setattr(triton_backend, "available", lambda device: None)
