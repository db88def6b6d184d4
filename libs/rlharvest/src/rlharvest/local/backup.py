"""`rlharvest backup` and `restore`: the coordinator's own commands, told where a data directory keeps things.

Invariant: a backup may be made of a directory that is in use; one is restored only into a directory that is not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

from rlharvest.errors import InvalidField, NotFound
from rlharvest.local.datadir import DataDirectory


def backup(data: Path, file: Path) -> int:
    """Back up a data directory; return the exit status.

    Raises:
        NotFound: it is no data directory.
    """
    if not (data / "coordinator").is_dir():
        raise NotFound(f"{data} is no data directory of `rlharvest up`. Name it: --data DIR")
    return _run("backup", data, file)


def restore(data: Path, file: Path) -> int:
    """Make a data directory from a backup; return the exit status.

    Raises:
        Conflict: something runs on it.
        InvalidField: it is not empty.
    """
    used = sorted(path.name for path in data.iterdir()) if data.is_dir() else []
    if used:
        problem = f"is not empty: it has {used[0]!r}"
        raise InvalidField("--data", str(data), problem, "Name a directory that does not exist yet.")
    directory = DataDirectory(data)
    directory.create()
    directory.acquire()
    try:
        return _run("restore", data, file)
    finally:
        directory.release()


def _run(command: Literal["backup", "restore"], data: Path, file: Path) -> int:
    script = Path(sys.executable).parent / "rlharvest-coordinator"
    if not script.exists():
        raise NotFound(f"the coordinator is not installed in {sys.prefix}. Run: pip install 'rlharvest[local]'")
    places = {
        "RLHARVEST_DATA_DIR": str(data / "coordinator"),
        "RLHARVEST_CHECKPOINTS_DIR": str(data / "checkpoints"),
        "RLHARVEST_LOG_FORMAT": "auto",
    }
    weights = str(data / "weights" / "weights")
    return subprocess.run(
        [sys.executable, str(script), command, str(file), "--weights", weights],
        env={**os.environ, **places},
        check=False,
    ).returncode
