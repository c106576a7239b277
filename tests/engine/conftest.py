from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny import KINDS, make_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a kind of tiny model to its folder; each is built once."""
    made = {kind: make_tiny(tmp_path_factory.mktemp("tiny") / kind, kind) for kind in KINDS}
    return lambda kind: made[kind]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
