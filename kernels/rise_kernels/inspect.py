"""What the Triton kernels compile to, without a GPU: registers, stack (spills), shared memory, matrix instructions.

    python -m rise_kernels.inspect              # every kernel for sm_80, sm_90 and sm_100 at Qwen3's shapes
    python -m rise_kernels.inspect --arch 90 --json

Compiles ahead of time with the compiler that a launch would use, and reads the result with the cuobjdump of Triton's
own wheel. Results are kept in Triton's cache, so the second run takes seconds.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .triton_backend.elementary import INTERPRETED
from .triton_backend.launch import BLOCK_ROWS, BLOCK_TILES, FP16_RANGE
from .triton_backend.logits import backward_kernel, forward_kernel
from .triton_backend.rows import dlogits_kernel, loss_kernel, statistics_kernel
from .triton_backend.tiles import TILES, Tile

ARCHITECTURES = (80, 90, 100)
_TL = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
_INTEGERS = ("n_rows", "n_cols", "n_tiles", "first_col", "vocab", "depth")
_FLOATS = (
    "softcap", "temperature", "inverse_temperature", "log_gamma", "ratio_low", "ratio_high", "dual_clip", "kl_coef",
    "is_cap",
)  # fmt: skip
# Qwen3: D = 2560 or 5120, V = 151,936; what the compiler sees of them is that 16 divides them.
_MULTIPLES_OF_16 = ("vocab", "depth", "stride", "hidden_stride", "weight_stride", "workspace_stride")
_TYPED = {"target": "*i64", "is_guide": "*i8", "clipped_out": "*i8"}


@dataclass(frozen=True)
class Job:
    """One compilation. `absent`: pointer arguments that are None in this variant."""

    kernel: str
    variant: str
    arch: int
    dtype: str
    constants: dict[str, Any]
    tile: Tile | None = None
    absent: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class Report:
    """`stack` is bytes per thread in local memory: anything but 0 is a spill. `shared`: bytes per program."""

    kernel: str
    variant: str
    arch: int
    dtype: str
    tile: str
    registers: int
    stack: int
    shared: int
    wgmma: int
    tcgen05: int
    mma: int


def jobs(architectures: tuple[int, ...] = ARCHITECTURES) -> Iterator[Job]:
    """Every kernel in the variants that training uses, for every candidate tile."""
    for arch in architectures:
        tiles = TILES[arch // 10, 2]
        for tile in tiles:
            yield _forward(arch, "bf16", tile, "fused")
            yield _backward(arch, "bf16", tile, "logprob")
        yield _forward(arch, "bf16", tiles[0], "statistics", store=False)
        yield _forward(arch, "bf16", tiles[0], "fused + entropy", entropy=True)
        yield _backward(arch, "bf16", tiles[0], "logprob + entropy", entropy=True)
        yield _backward(arch, "fp16", tiles[0], "logprob")
        if arch == 90:
            yield _forward(arch, "bf16", tiles[0], "statistics + entropy", store=False, entropy=True)
            yield _forward(arch, "bf16", tiles[0], "fused + bias", bias=True)
            yield _forward(arch, "bf16", tiles[0], "fused + softcap", softcap=True)
            yield _forward(arch, "bf16", tiles[0], "fused + softcap + entropy", softcap=True, entropy=True)
            yield _backward(arch, "bf16", tiles[0], "logprob + bias + softcap", bias=True, softcap=True)
        for tile in TILES[arch // 10, 4]:
            yield _forward(arch, "fp32", tile, "fused")
            yield _backward(arch, "fp32", tile, "logprob")
        yield _statistics(arch)
        yield from (_loss(arch, *variant) for variant in (LOSSES if arch == 90 else LOSSES[-1:]))
        width = tiles[0].block_n
        for dtype in ("bf16", "fp16") if arch == 90 else ("bf16",):
            yield _dlogits(arch, dtype, width, softcap=False)
        yield _dlogits(arch, "bf16", width, softcap=True)


def _gemm_constants(dtype: str, arch: int, tile: Tile, bias: bool, softcap: bool) -> dict[str, Any]:
    return {
        "HAS_BIAS": bias, "HAS_SOFTCAP": softcap, "STORAGE": tl.float32 if dtype == "fp32" else tl.float16,
        "DESCRIPTORS": arch >= 90, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m, "ARCHITECTURE": arch // 10,
    }  # fmt: skip


def _forward(
    arch: int, dtype: str, tile: Tile, variant: str, *, store=True, entropy=False, bias=False, softcap=False
) -> Job:
    constants = _gemm_constants(dtype, arch, tile, bias, softcap) | {
        "STORE": store, "WITH_ENTROPY": entropy, "EXTRA_BITS": 0 if dtype == "fp32" else FP16_RANGE,
    }  # fmt: skip
    absent = {"bias": bias, "workspace": store, "tile_slope": entropy}
    return _gemm_job("forward", variant, arch, dtype, tile, constants, absent)


def _backward(arch: int, dtype: str, tile: Tile, variant: str, *, entropy=False, bias=False, softcap=False) -> Job:
    constants = _gemm_constants(dtype, arch, tile, bias, softcap) | {"HAS_TILT": entropy, "GRAD_DTYPE": _TL[dtype]}
    absent = {"bias": bias, "entropy": entropy, "grad_entropy": entropy}
    return _gemm_job("backward", variant, arch, dtype, tile, constants, absent)


def _gemm_job(
    kernel: str, variant: str, arch: int, dtype: str, tile: Tile, constants: dict[str, Any], present: dict[str, bool]
) -> Job:
    absent = frozenset(name for name, there in present.items() if not there)
    return Job(kernel, variant, arch, dtype, constants, tile, absent, tile.num_warps, tile.num_stages)


_ROW_BLOCKS: dict[str, Any] = {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_TILES": BLOCK_TILES}
_FLAGS = {  # of the row kernel, and the pointers that are None without them
    "HAS_POLICY": ("advantage",), "HAS_OLD": ("old_logprob",), "HAS_REF": ("ref_logprob", "kl_out"), "HAS_KL": (),
    "HAS_BEHAVIOUR": ("behaviour_logprob",), "HAS_CAP": (), "HAS_DUAL": (),
    "WITH_ENTROPY": ("tile_slope", "entropy_out"),
}  # fmt: skip
# (variant, guide loss, KL estimator, flags that are off): every value of every choice that a caller has. The last holds
# the most at a time.
_NO_POLICY = tuple(name for name in _FLAGS if name != "WITH_ENTROPY")
LOSSES: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("guide", "log_support", "k3", _NO_POLICY),
    ("guide support", "support", "k3", (*_NO_POLICY, "WITH_ENTROPY")),
    ("policy", "log_support", "k3", (*_NO_POLICY[1:], "WITH_ENTROPY")),
    ("policy logprob k1", "logprob", "k1", ("HAS_KL", "HAS_CAP")),
    ("policy support k2", "support", "k2", ("HAS_OLD", "HAS_DUAL")),
    ("every option k3", "log_support", "k3", ()),
    ("every option", "log_support", "k3_ratio", ()),
)


def _statistics(arch: int) -> Job:
    return Job("statistics", "entropy", arch, "fp32", _ROW_BLOCKS | {"WITH_ENTROPY": True})


def _loss(arch: int, variant: str, guide: str, kl_estimator: str, off: tuple[str, ...]) -> Job:
    flags = {name: name not in off for name in _FLAGS}
    absent = frozenset(pointer for name in off for pointer in _FLAGS[name])
    return Job(
        "loss", variant, arch, "fp32", _ROW_BLOCKS | flags | {"KL_ESTIMATOR": kl_estimator, "GUIDE": guide},
        absent=absent,
    )  # fmt: skip


def _dlogits(arch: int, dtype: str, width: int, *, softcap: bool) -> Job:
    constants = {"HAS_SOFTCAP": softcap, "GRAD_DTYPE": _TL[dtype], "BLOCK_ROWS": BLOCK_ROWS, "BLOCK_N": width}
    return Job("dlogits", "softcap" if softcap else "", arch, dtype, constants, num_warps=8)


_KERNELS = {
    "forward": forward_kernel,
    "backward": backward_kernel,
    "statistics": statistics_kernel,
    "loss": loss_kernel,
    "dlogits": dlogits_kernel,
}


def source(job: Job) -> ASTSource:
    kernel = _KERNELS[job.kernel]
    function = getattr(kernel, "fn", kernel) if job.tile else kernel  # a tuned kernel wraps the compiled one
    storage = "fp32" if job.dtype == "fp32" else "fp16"
    signature, constants = {}, {}
    for name in function.arg_names:
        if name in job.constants or name in job.absent:
            signature[name], constants[name] = "constexpr", job.constants.get(name)
        elif name in ("hidden", "weight", "workspace"):
            signature[name] = _matrix(job, name, storage if name == "workspace" else job.dtype)
        elif name in _INTEGERS or name.endswith("stride"):
            signature[name] = "i32"
        elif name in _FLOATS:
            signature[name] = "fp32"
        else:
            signature[name] = _TYPED.get(name, "*bf16" if name == "bias" else "*fp32")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(function.arg_names)
        if (signature[name].startswith("*") and name not in function.do_not_specialize_on_alignment)
        or name in _MULTIPLES_OF_16
    }
    return ASTSource(function, signature, constants, aligned)


def _matrix(job: Job, name: str, element: str) -> str:
    if job.tile is None or not job.constants["DESCRIPTORS"]:
        return f"*{element}"
    tile = job.tile
    rows, columns = {
        "hidden": (tile.block_m, tile.block_k),
        "weight": (tile.block_n, tile.block_k),
        "workspace": (tile.block_m, tile.block_n // 2),
    }[name]
    return f"tensordesc<{element}[{rows}, {columns}]>"


def compile_job(job: Job) -> Report:
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
    compiled = triton.compile(source(job), target=GPUTarget("cuda", job.arch, 32), options=options)
    registers, stack = _resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    tile = job.tile
    shape = "" if tile is None else f"{tile.block_m}x{tile.block_n}x{tile.block_k} w{tile.num_warps} s{tile.num_stages}"
    if tile is not None and tile.group_m != Tile.group_m:
        shape += f" g{tile.group_m}"
    return Report(
        job.kernel, job.variant, job.arch, job.dtype, shape, registers, stack, compiled.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"), tcgen05=ptx.count("tcgen05.mma"), mma=ptx.count("mma.sync"),
    )  # fmt: skip


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of stack per thread)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump: expected a line with REG and STACK, found {text!r}")
    return int(found[1]), int(found[2])


_LINE = "{:11}{:26}{:>4} {:5}{:21}{:>10}{:>6}{:>11}  {}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rise_kernels.inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, help="only this architecture")
    parser.add_argument("--json", action="store_true", help="a list of reports instead of a table")
    args = parser.parse_args()
    if INTERPRETED:
        sys.exit("rise_kernels.inspect: the kernels are interpreted; unset TRITON_INTERPRET to compile them")
    reports = []
    if not args.json:
        print(_LINE.format("kernel", "variant", "sm", "type", "tile", "registers", "stack", "shared KiB", "products"))
    for job in jobs(ARCHITECTURES if args.arch is None else (args.arch,)):
        r = compile_job(job)
        reports.append(asdict(r))
        if not args.json:
            kind = next((name for name in ("wgmma", "tcgen05", "mma") if getattr(r, name)), "")
            shared = f"{r.shared / 1024:.1f}"
            line = _LINE.format(r.kernel, r.variant, r.arch, r.dtype, r.tile, r.registers, r.stack, shared, kind)
            print(line, flush=True)
    if args.json:
        print(json.dumps(reports))


if __name__ == "__main__":
    main()
