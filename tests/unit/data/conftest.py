"""A model directory below the test's own root."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rlharvest.testing.tiny_model import write_tiny_model


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Return `make(name="model", **settings of write_tiny_model)`."""

    def make(name: str = "model", **settings: Any) -> Path:
        return write_tiny_model(tmp_path / name, **settings)

    return make
