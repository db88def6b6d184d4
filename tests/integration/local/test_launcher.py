"""The launcher with small fake services: order, restarts, scale, and that nothing is ever left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rlharvest.errors import Conflict, Unavailable
from rlharvest.local import control
from rlharvest.local.datadir import DataDirectory
from rlharvest.local.launcher import MOST_WORKERS

SCRIPT = Path(__file__).parent / "fake_up.py"

Start = Callable[..., "Up"]

WAIT_S = 60.0
"""The machine may be busy with other tests."""


class Up:
    """A launcher process and what it started."""

    def __init__(self, data: Path, kind: str) -> None:
        self.data = data
        self.output = data.parent / f"output-{time.monotonic_ns()}"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen([sys.executable, str(SCRIPT), str(data), kind], stdout=file, stderr=file)

    @property
    def text(self) -> str:
        return self.output.read_text()

    def ask(self, **request: Any) -> dict[str, Any]:
        return control.ask(self.data / "control", request)

    def pids(self) -> dict[str, int]:
        return {one["name"]: one["pid"] for one in self.ask(verb="ps")["programs"]}

    def family(self) -> list[psutil.Process]:
        """The launcher's children and theirs."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def until_ready(self) -> None:
        wait(lambda: '{"ready"' in self.text or self.process.poll() is not None)
        assert self.process.poll() is None, self.text


def wait(condition: Callable[[], Any], *, timeout_s: float = WAIT_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the time is over"
        time.sleep(0.02)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Up] = []

    def one(kind: str = "good") -> Up:
        up = Up(tmp_path / "data", kind)
        started.append(up)
        return up

    yield one
    for up in started:
        if up.process.poll() is None:
            up.process.send_signal(signal.SIGTERM)
            up.process.wait(WAIT_S)


def test_it_starts_in_order_and_sigterm_stops_in_order_with_exit_0(start: Start) -> None:
    up = start()
    up.until_ready()
    assert set(up.pids()) == {"nats", "coordinator", "rollout-1", "rollout-2"}
    lines = [line.partition("│ ")[2] for line in up.text.splitlines()]
    ready = [line.split()[0] for line in lines if " is ready (" in line or " is done (" in line]
    assert ready[:3] == ["nats", "migrate", "coordinator"]
    assert sorted(ready[3:]) == ["rollout-1", "rollout-2"]
    assert "hello who=coordinator" in up.text
    assert '"who": "coordinator"' in (up.data / "logs" / "coordinator.log").read_text()

    family = up.family()
    assert len(family) == 8  # four services and what each of them started
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(WAIT_S) == 0
    assert not alive(family)
    stops = (up.data / "stops").read_text().split()
    assert sorted(stops[:2]) == ["rollout-1", "rollout-2"]
    assert stops[2:] == ["coordinator", "nats"]
    assert not DataDirectory(up.data).read("pids.json")
    assert not (up.data / "up.json").exists()


def test_a_killed_child_is_started_again_and_its_children_do_not_stay(start: Start) -> None:
    up = start()
    up.until_ready()
    before = up.pids()
    children = psutil.Process(before["coordinator"]).children()
    os.kill(before["coordinator"], signal.SIGKILL)
    wait(lambda: "coordinator is ready again" in up.text)
    after = up.pids()
    assert after["coordinator"] != before["coordinator"]
    assert after["nats"] == before["nats"]
    assert not alive(children)
    assert "coordinator was ended by SIGKILL; starting it again" in up.text


def test_a_child_that_ends_too_often_stops_everything_and_shows_its_log(start: Start) -> None:
    up = start()
    up.until_ready()
    family = up.family()
    killed = {0}
    for _ in range(4):
        wait(lambda: up.pids().get("coordinator", 0) not in killed)
        pid = up.pids()["coordinator"]
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    assert up.process.wait(WAIT_S) == 1
    assert "4 times in 60 s. The end of" in up.text
    assert not alive(family)


def test_a_service_that_cannot_start_is_named_with_the_end_of_its_log(start: Start) -> None:
    up = start("broken")
    assert up.process.wait(WAIT_S) == 1
    assert "error: coordinator ended with exit code 3" in up.text
    assert "    cannot open the thing" in up.text


def test_a_service_that_ignores_sigterm_is_killed_after_its_time(start: Start) -> None:
    up = start("deaf")
    up.until_ready()
    family = up.family()
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(WAIT_S) == 0
    assert "coordinator did not stop in 0.5 s and was killed" in up.text
    assert not alive(family)


def test_kill_9_of_the_launcher_leaves_no_service_and_the_next_one_ends_what_these_had_started(start: Start) -> None:
    up = start()
    up.until_ready()
    services = [psutil.Process(pid) for pid in up.pids().values()]
    family = up.family()
    up.process.kill()
    up.process.wait()
    wait(lambda: not alive(services))
    second = start()
    second.until_ready()
    assert not alive(family)


def test_kill_9_in_the_middle_of_the_start_leaves_no_service(start: Start) -> None:
    up = start()
    wait(lambda: "nats is ready" in up.text)
    family = up.family()
    up.process.kill()
    up.process.wait()
    services = [one for one in family if one.is_running() and "sleep" not in one.name()]
    wait(lambda: not alive(services))


def test_a_second_launcher_on_the_same_directory_is_refused_with_the_pid_of_the_first(start: Start) -> None:
    up = start()
    up.until_ready()
    second = start()
    assert second.process.wait(WAIT_S) == 1
    assert f"already up on {up.data} (pid {up.process.pid})" in second.text
    assert up.process.poll() is None
    assert up.ask(verb="ps")["ready"]


def test_scale_adds_workers_and_lets_the_last_ones_leave_in_order(start: Start) -> None:
    up = start()
    up.until_ready()
    assert up.ask(verb="scale", rollout=4)["started"] == ["rollout-3", "rollout-4"]
    assert {"rollout-3", "rollout-4"} <= set(up.pids())
    # One that is not ready does not know yet how to leave in order.
    wait(lambda: "rollout-3 is ready" in up.text and "rollout-4 is ready" in up.text)
    assert up.ask(verb="scale", rollout=1)["stopping"] == ["rollout-2", "rollout-3", "rollout-4"]
    wait(lambda: set(up.pids()) == {"nats", "coordinator", "rollout-1"})
    assert sorted((up.data / "stops").read_text().split()) == ["rollout-2", "rollout-3", "rollout-4"]
    assert up.ask(verb="scale", rollout=2)["started"] == ["rollout-2"]
    for count in (-1, MOST_WORKERS + 1):
        with pytest.raises(Conflict, match=f"not a number of workers. Give one from 0 to {MOST_WORKERS}"):
            up.ask(verb="scale", rollout=count)


def test_a_worker_that_leaves_by_itself_with_0_is_not_started_again(start: Start) -> None:
    up = start()
    up.until_ready()
    os.kill(up.pids()["rollout-2"], signal.SIGTERM)
    wait(lambda: "rollout-2 left in order" in up.text)
    assert "rollout-2" not in up.pids()
    assert up.ask(verb="scale", rollout=2)["started"] == ["rollout-2"]


def test_control_says_that_nobody_is_there(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no `rlharvest up` runs on"):
        control.ask(tmp_path / "control", {"verb": "ps"})
