"""Tile shapes per architecture, and the persistent grid's order.

The columns of a tile share one set of statistics, and buffers are sized by it, so `block_n` is the same for all
candidates of an architecture and type. So is the number of warps, which decides how a row's columns are added up: what
autotuning chooses among changes no result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .elementary import INTERPRETED


@dataclass(frozen=True)
class Tile:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8

    def config(self) -> triton.Config:
        names = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "GROUP_M": self.group_m}
        return triton.Config(names, num_warps=self.num_warps, num_stages=self.num_stages, pre_hook=_shape_descriptors)


def _shape_descriptors(arguments: dict) -> None:
    """The descriptors' block shapes follow the configuration under trial (Triton calls this before every launch)."""
    m, n, k = arguments["BLOCK_M"], arguments["BLOCK_N"], arguments["BLOCK_K"]
    for name, shape in (("hidden", [m, k]), ("weight", [n, k]), ("workspace", [m, n // 2])):
        if isinstance(arguments[name], TensorDescriptor):
            arguments[name].block_shape = shape


# (major compute capability, bytes of an element) -> candidates, best guess first. `python -m rise_kernels.inspect`
# prints what each compiles to (registers, spills, shared memory); docs/kernels.md says what was rejected.
TILES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (8, 2): (Tile(128, 128, 64, 8, 3), Tile(128, 128, 32, 8, 4)),
    (9, 2): (Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 3, group_m=16), Tile(128, 256, 32, 8, 4)),
    (10, 2): (Tile(128, 128, 64, 8, 4),),
    (8, 4): (Tile(64, 64, 32, 8, 3),),
    (9, 4): (Tile(64, 64, 32, 8, 3),),
    (10, 4): (Tile(64, 64, 32, 8, 3),),
}


_INTERPRETER_TILE = Tile(32, 256, 32, 4, 1, group_m=2)  # small: most of a test's tile is padding


def architecture(device: torch.device) -> int:
    """8, 9 or 10: the tiles to use. 8 stands for every GPU without the shared memory of the data-centre parts; the
    interpreter follows 9, so that it takes the path of tensor descriptors."""
    if device.type != "cuda":
        return 9
    major = torch.cuda.get_device_capability(device)[0]
    return major if major in (9, 10) else 8


def has_descriptors(device: torch.device) -> bool:
    """Elsewhere Triton turns descriptors into loads that it does not pipeline."""
    return architecture(device) >= 9


def programs(device: torch.device) -> int:
    """Of the persistent grid: one per multiprocessor. The interpreter runs a few, so that each sees several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def stat_width(device: torch.device, itemsize: int) -> int:
    """Columns that share one set of statistics."""
    return (_INTERPRETER_TILE if INTERPRETED else TILES[architecture(device), itemsize][0]).block_n


def all_configs() -> list[triton.Config]:
    """Every tile once; `matching_configs` keeps those of the device at hand. The interpreter cannot choose."""
    tiles = [_INTERPRETER_TILE] if INTERPRETED else dict.fromkeys(tile for some in TILES.values() for tile in some)
    return [tile.config() for tile in tiles]


def matching_configs(configs: list[triton.Config], arguments: dict, **_: object) -> list[triton.Config]:
    base = getattr(arguments["hidden"], "base", arguments["hidden"])
    tiles = TILES[architecture(base.device), base.element_size()]
    wanted = [tile.config().all_kwargs() for tile in tiles]
    return [config for config in configs if config.all_kwargs() in wanted]


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row, column) of a tile, GROUP_M row tiles per column tile before the next, so that both operands stay in L2."""
    per_group = GROUP_M * tiles_n
    first_m = (tile // per_group) * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    within = tile % per_group
    return first_m + within % rows, within // rows
