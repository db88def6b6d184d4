"""A model directory below the test's own root."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rlharvest.testing.model import CHAT, tiny_model


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Return `make(name="model", **settings of tiny_model)`: a chat model without generation_config.json."""

    def make(name: str = "model", **settings: Any) -> Path:
        small = {"words": CHAT, "hidden": 8, "context": 128, "generation_config": False}
        return tiny_model(tmp_path / name, **{**small, **settings})

    return make
