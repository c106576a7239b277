"""A program, run by tests/test_compile.py: call the public functions and compile, for sm_90, every kernel exactly as it
would be launched - the arguments' types, the descriptors, the tuned configuration - without running any.

Prints one line per launch: the kernel, and which binary it is. What the functions return is fresh memory and means
nothing.
"""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Driver:
    """As much of a GPU's driver as compiling needs."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


class CompileOnly:
    def __init__(self, kernel, matching_configs):
        self.tuned = kernel if hasattr(kernel, "configs") else None
        self.compiled = kernel.fn if self.tuned else kernel
        self.matching_configs = matching_configs

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **keywords):
        if self.tuned:
            given = dict(zip(self.compiled.arg_names, args))
            config = self.matching_configs(self.tuned.configs, given)[0]
            config.pre_hook(given | keywords | config.all_kwargs())
            keywords = keywords | config.all_kwargs()
        kernel = self.compiled.run(*args, grid=(1,), warmup=True, **keywords)
        assert kernel.asm["cubin"]
        print(self.compiled.__name__, kernel.hash)


def main() -> None:
    driver.set_active(Driver())
    import rise_kernels
    from rise_kernels import triton_backend
    from rise_kernels.triton_backend import launch, tiles

    triton_backend.available = lambda device: None
    for name in ("forward_kernel", "backward_kernel", "statistics_kernel", "loss_kernel", "dlogits_kernel"):
        setattr(launch, name, CompileOnly(getattr(launch, name), tiles.matching_configs))
    d, v = 64, 1000
    weight = torch.randn(v, d, dtype=torch.bfloat16, requires_grad=True)
    for n, budget in ((40, 512 << 20), (3, 1)):
        options = rise_kernels.Options(budget=budget)
        hidden = torch.randn(n, d, dtype=torch.bfloat16, requires_grad=True)
        target, row = torch.randint(0, v, (n,)), torch.rand(n)
        rise_kernels.linear_rise_loss(
            hidden, weight, target, row + 1, row + 1, row < 0.5, row, ref_logprob=row, kl_coef=0.1, backend="triton",
            options=options,
        ).loss.backward()  # fmt: skip
        stats = rise_kernels.linear_logprob(
            hidden, weight, target, with_entropy=True, backend="triton", options=options
        )
        (stats.logprob.sum() + stats.entropy.sum()).backward()


if __name__ == "__main__":
    main()
