"""FLOPs of the products that Triton kernels do, counted from their launches (torch counts its own)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Launches:
    """(kernel, rows, vocabulary entries, depth) of every launch of a GEMM."""

    gemms: list[tuple[str, int, int, int]] = field(default_factory=list)

    @property
    def flops(self) -> int:
        return sum(2 * rows * columns * depth for _, rows, columns, depth in self.gemms)


@contextmanager
def triton_launches() -> Iterator[Launches]:
    from rise_kernels.triton_backend import logits

    found = Launches()

    def recorded(kernel, name):
        original, names = kernel.run, kernel.arg_names

        def run(*args, **keywords):
            given = dict(zip(names, args)) | keywords
            found.gemms.append((name, given["n_rows"], given["n_cols"], given["depth"]))
            return original(*args, **keywords)

        return run

    kernels = {"forward": logits.forward_kernel, "backward": logits.backward_kernel}
    for name, kernel in kernels.items():
        kernel.run = recorded(kernel, name)
    try:
        yield found
    finally:
        for kernel in kernels.values():
            del kernel.run
