"""How a call is cut up so that its temporaries stay within the byte budget."""

from __future__ import annotations

_TILE_M, _TILE_N = 128, 256  # the output tile of the library's products, for counting waves
# A chunk reads and writes dW: 8 V D bytes, which on an H200 (4 TB/s, 790 TFLOP/s) take as long as D / 5500 waves.
_WAVE_DEPTH = 5500


def slab_size(vocab: int, budget: int, bytes_per_entry: int, step: int) -> int:
    """Vocabulary entries per slab: a multiple of `step`, at least one."""
    return min(vocab, max(1, budget // max(1, bytes_per_entry) // step) * step)


def chunk_rows(n: int, budget: int, bytes_per_row: int, *, depth: int, multiprocessors: int) -> int:
    """Rows per chunk: as many as the budget holds, rather fewer if their dH product then fills whole waves.

    Among multiples of 128 of at least half of what fits, the one that takes the least time per row: the waves of dH and
    the traffic of dW, which every chunk has anew.
    """
    most = max(1, min(n, budget // bytes_per_row))
    if most == n or most < _TILE_M:
        return most

    def time_per_row(rows: int) -> float:
        tiles = (rows // _TILE_M) * -(-depth // _TILE_N)
        return (-(-tiles // multiprocessors) + depth / _WAVE_DEPTH) / rows

    most -= most % _TILE_M
    least = max(_TILE_M, most // 2)
    return min(range(most, least - 1, -_TILE_M), key=time_per_row)


def chunks(start: int, stop: int, size: int) -> list[slice]:
    return [slice(i, min(stop, i + size)) for i in range(start, stop, size)]
