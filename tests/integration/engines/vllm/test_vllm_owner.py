"""A worker that is killed leaves no engine behind it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_processes_of_an_engine_end_with_a_worker_that_is_killed(make_model: Any) -> None:
    script = Path(__file__).with_name("owner.py")
    directory = make_model(head_dim=32, tied=True, seed=0)
    with subprocess.Popen([sys.executable, script, directory], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        try:
            line = next(line for line in owner.stdout if line.startswith("engine "))
        finally:
            owner.kill()
    engine = [psutil.Process(int(pid)) for pid in line.split()[1:] if psutil.pid_exists(int(pid))]
    _, alive = psutil.wait_procs(engine, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
