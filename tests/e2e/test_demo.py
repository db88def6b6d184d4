"""`make demo` finds the system that it starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "arithmetic" / "demo.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_reaches_the_system_that_it_starts_and_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(DEMO.parent))
    found = importlib.util.spec_from_file_location("arithmetic_demo", DEMO)
    assert found is not None
    assert found.loader is not None
    demo = importlib.util.module_from_spec(found)
    found.loader.exec_module(demo)
    with demo.system(tmp_path / "data", tmp_path, 1) as client:
        assert client.ready() == {}
        client.workers()  # the token is right
    assert not (tmp_path / "data" / "up.json").exists()
