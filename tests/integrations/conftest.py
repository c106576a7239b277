from __future__ import annotations

import pytest

from tests.tiny import make_tiny


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Tiny models as folders, by kind; spread little enough that answers vary."""
    root = tmp_path_factory.mktemp("models")
    return {kind: make_tiny(root / kind, kind, scale=4.0) for kind in ("qwen3", "qwen3-tied", "llama")}
