"""Who may import what: services stay apart, and only the trainer and the rollout worker ever load torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# alembic runs the migrations inside an environment of its own; they are no modules to import.
_IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__") and ".migrations" not in module.name:
        importlib.import_module(module.name)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.parametrize("package", ["rlharvest", "rlharvest_coordinator", "rlharvest_reward", "rlharvest_weights"])
def test_no_module_loads_torch_or_a_service_that_is_not_its_own(package: str) -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, package], capture_output=True, text=True, timeout=100, check=False
    )
    assert loaded.returncode == 0, loaded.stderr[-2000:]
    names = set(loaded.stdout.split())
    assert not names & {"torch", "transformers", "tensorflow", "jax"}
    assert {name for name in names if name.startswith("rlharvest_")} <= {package}


def test_the_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert checked.returncode == 0, checked.stdout[-4000:]
