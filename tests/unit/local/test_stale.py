"""Processes that a killed launcher left are ended, and only those."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from rlharvest.local import stale

COMMAND = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(COMMAND, start_new_session=True)
    yield process
    process.kill()
    process.wait()


def until_running(process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 5
    while psutil.Process(process.pid).cmdline() != COMMAND and time.monotonic() < end:
        time.sleep(0.01)


def test_a_recorded_process_is_ended(sleeper: subprocess.Popen[bytes]) -> None:
    until_running(sleeper)
    assert stale.end({"x": stale.record(sleeper.pid, COMMAND)}) == ["x"]
    assert sleeper.wait(5) != 0


def test_a_process_that_got_the_pid_later_or_runs_something_else_is_left_alone(
    sleeper: subprocess.Popen[bytes],
) -> None:
    until_running(sleeper)
    entry = stale.record(sleeper.pid, COMMAND)
    assert stale.end({"x": {**entry, "started": entry["started"] - 60}}) == []
    assert stale.end({"x": {**entry, "command": [sys.executable, "-c", "other"]}}) == []
    assert stale.end({"x": {**entry, "boot": "another"}}) == []
    assert sleeper.poll() is None


def test_a_pid_that_is_gone_is_nothing(sleeper: subprocess.Popen[bytes]) -> None:
    entry = stale.record(sleeper.pid, COMMAND)
    sleeper.kill()
    sleeper.wait()
    assert stale.end({"x": entry}) == []
