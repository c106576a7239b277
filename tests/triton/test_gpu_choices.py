"""What is chosen by the GPU at hand, on every generation: whether a call runs there at all, and with which tiles."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rise_kernels import chunked, select, triton_backend
from rise_kernels.triton_backend import tiles

CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """A process that compiles, on a GPU of the compute capability that is asked for."""
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "hip", None)

    def have(*capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return have


@pytest.mark.parametrize(
    "capability, arch, width",
    [((8, 0), 8, 128), ((8, 6), 8, 128), ((8, 9), 8, 128), ((9, 0), 9, 256), ((10, 0), 10, 128), ((12, 0), 8, 128)],
)
def test_tiles(gpu, capability, arch, width):
    """Consumer GPUs, 12.0 too, lack the shared memory of the data-centre parts: theirs are the tiles of 8.0."""
    gpu(*capability)
    assert triton_backend.available(CUDA) is None
    assert tiles.architecture(CUDA) == arch
    assert tiles.has_descriptors(CUDA) == (arch != 8)
    assert tiles.stat_width(CUDA, 2) == width
    assert tiles.stat_width(CUDA, 4) == 64
    for itemsize in (2, 4):
        matrix = SimpleNamespace(device=CUDA, element_size=lambda size=itemsize: size)
        for hidden in (matrix, SimpleNamespace(base=matrix)):
            found = tiles.matching_configs(tiles.all_configs(), {"hidden": hidden})
            wanted = [tile.config() for tile in tiles.TILES[arch, itemsize]]
            assert [config.all_kwargs() for config in found] == [config.all_kwargs() for config in wanted]


def test_gpus_that_cannot(gpu, monkeypatch):
    gpu(7, 5)
    assert "7.5" in triton_backend.available(CUDA)
    gpu(9, 4)  # what ROCm says of an MI300
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm" in triton_backend.available(CUDA)


def test_auto_is_triton_where_it_runs_and_chunked_elsewhere(monkeypatch):
    monkeypatch.setattr(select, "triton_unavailable", lambda device: None)
    assert select.select_backend("auto", CUDA) is triton_backend.backend
    assert select.select_backend("auto", torch.device("cpu")) is chunked.backend  # the interpreter is never chosen
    monkeypatch.setattr(select, "triton_unavailable", lambda device: "it is too old")
    assert select.select_backend("auto", CUDA) is chunked.backend
    with pytest.raises(RuntimeError, match="'triton' cannot run on cuda: it is too old"):
        select.select_backend("triton", CUDA)
