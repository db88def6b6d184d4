"""A process in its first seconds: a worker, and a coordinator, whose imports take as long."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlharvest.testing.servers import free_port

SIGTERM_BIT = 1 << 14


def started(service: str) -> subprocess.Popen[bytes]:
    """Start a process that no service answers; return when it handles SIGTERM."""
    process = subprocess.Popen(
        [
            *("env", f"RLHARVEST_NATS_URL=nats://127.0.0.1:{free_port()}", "RLHARVEST_ENGINES=torch"),
            *(sys.executable, "-c", f"from rlharvest_{service}.main import main; main()", "serve"),
        ],
        stderr=subprocess.PIPE,
    )
    status = Path(f"/proc/{process.pid}/status")
    while not any(
        line.startswith("SigCgt:") and int(line.split()[1], 16) & SIGTERM_BIT
        for line in status.read_text().splitlines()
    ):
        time.sleep(0.005)
    return process


@pytest.mark.parametrize(
    ("service", "after_s"), [("rollout", 0.0), ("rollout", 0.4), ("rollout", 1.5), ("coordinator", 0.4)]
)
def test_sigterm_while_it_imports_exits_with_0_at_once(service: str, after_s: float) -> None:
    process = started(service)
    time.sleep(after_s)
    process.terminate()
    since = time.monotonic()
    _, said = process.communicate(timeout=20)
    assert process.returncode == 0, said.decode()
    assert b"Traceback" not in said
    print(f"exited {time.monotonic() - since:.2f} s after SIGTERM")
