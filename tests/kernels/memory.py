"""How much memory the tensors made inside a `with` block hold at once."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations return while it is on, now and at most; existing ones are not counted.

    Sees every tensor that an operation returns, also in backward passes, but not a kernel's internal scratch.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor):
                self._count(x.untyped_storage(), 0)
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._count(x.untyped_storage(), x.untyped_storage().nbytes())
        return out

    def _count(self, storage, size):
        key = storage._cdata  # an address, which another has when this one is gone
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        self.largest = max(self.largest, size)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key, size):
        self._known.discard(key)
        self.now -= size
