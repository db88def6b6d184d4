"""The committed protobuf code is what proto/generate.sh makes of proto/ now."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "libs" / "rlharvest" / "src" / "rlharvest" / "v1"


def test_the_generated_code_is_fresh(tmp_path: Path) -> None:
    subprocess.run(
        ["bash", str(ROOT / "proto" / "generate.sh"), str(tmp_path)],
        env={**os.environ, "PYTHON": sys.executable},
        check=True,
        timeout=100,
    )
    made = {path.name: path.read_bytes() for path in (tmp_path / "rlharvest" / "v1").glob("*.py*")}
    committed = {path.name: path.read_bytes() for path in COMMITTED.glob("*.py*")}
    assert sorted(made) == sorted(committed), "run make proto"
    assert [name for name in made if made[name] != committed[name]] == [], "run make proto"
