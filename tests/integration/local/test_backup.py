"""`rlharvest backup` and `restore` on data directories of `up`: what they refuse, and that they find everything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPTS = Path(sys.executable).parent


def run(program: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RLHARVEST_")}
    command = [SCRIPTS / program, *map(str, arguments)]
    return subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True, check=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory that was up once."""
    directory = tmp_path / "data"
    for name in ("coordinator", "checkpoints", "weights/weights/jobs"):
        (directory / name).mkdir(parents=True)
    done = run("rlharvest-coordinator", "migrate", RLHARVEST_DATA_DIR=str(directory / "coordinator"))
    assert done.returncode == 0, done.stderr
    return directory


def test_a_directory_is_made_from_a_backup_and_never_over_another(data: Path, tmp_path: Path) -> None:
    file, new = tmp_path / "backup.tar", tmp_path / "new"
    made = run("rlharvest", "backup", file, "--data", data)
    assert (made.returncode, made.stdout) == (0, ""), made.stderr
    assert f"{file}, " in made.stderr
    again = run("rlharvest", "backup", file, "--data", data)
    assert again.returncode == 2
    assert "exists already" in again.stderr

    restored = run("rlharvest", "restore", file, "--data", new)
    assert restored.returncode == 0, restored.stderr
    assert "0 jobs go on" in restored.stderr
    assert (new / "coordinator" / "coordinator.sqlite3").is_file()
    over = run("rlharvest", "restore", file, "--data", new)
    assert over.returncode == 2
    assert "is not empty" in over.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup.tar", "data", "new"], "a draft is left"


def test_what_is_no_data_directory_or_no_backup_is_named(data: Path, tmp_path: Path) -> None:
    wrong = run("rlharvest", "backup", tmp_path / "b.tar", "--data", tmp_path)
    assert wrong.returncode == 2
    assert f"{tmp_path} is no data directory" in wrong.stderr
    nowhere = run("rlharvest", "backup", tmp_path / "none" / "b.tar", "--data", data)
    assert nowhere.returncode == 2
    assert "mkdir -p" in nowhere.stderr
    broken = tmp_path / "broken.tar"
    broken.write_bytes(b"no tar")
    refused = run("rlharvest", "restore", broken, "--data", tmp_path / "new")
    assert refused.returncode == 2
    assert "not a backup of rlharvest" in refused.stderr
    missing = run("rlharvest", "restore", tmp_path / "missing.tar", "--data", tmp_path / "newer")
    assert missing.returncode == 2
    assert "cannot be read" in missing.stderr
