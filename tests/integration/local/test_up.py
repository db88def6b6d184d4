"""`rlharvest up` with the real services: it comes up, a second one continues the jobs, and nothing stays behind."""

from __future__ import annotations

import json
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
from rlharvest.client import Client
from rlharvest.errors import RlharvestError
from rlharvest.keyring import Keyring
from rlharvest.testing.model import questions, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = Path(sys.executable).parent / "rlharvest"
PROGRAMS = {"nats", "valkey", "coordinator", "weights", "reward", "trainer-1", "rollout-1"}


class Up:
    """`rlharvest up` as a process."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.data = directory / "data"
        self.output = directory / f"up-{time.monotonic_ns()}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RLHARVEST_")}
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [PROGRAM, "up", "--data", self.data, "--port", "0", "--rollout", "1", *options],
                cwd=directory,
                env=environment,
                stdout=file,
                stderr=file,
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def until(self, condition: Callable[[], Any], what: str, *, timeout_s: float = 240.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < end, f"waited {timeout_s:g} s for {what}:\n{self.text[-8000:]}"
            time.sleep(0.1)

    def until_ready(self) -> Client:
        self.until(lambda: "rlharvest is up" in self.text, "everything to be ready")
        token = Keyring(self.data / "secrets").token("api_token")
        return Client(json.loads((self.data / "up.json").read_text())["url"], token)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def one(*options: str) -> Up:
        started.append(Up(tmp_path, *options))
        return started[-1]

    yield one
    for up in started:
        if up.process.poll() is None:
            up.stop()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def rlharvest(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLHARVEST_")}
    command = [str(part) for part in (PROGRAM, *arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


def write_job(directory: Path) -> Path:
    tiny_model(directory / "model")
    questions(directory / "train.jsonl")
    (directory / "rewards.py").write_text(
        "def short(prompts, completions, **columns):\n    return [float(len(text) % 5) for text in completions]\n"
    )
    job = {
        "model": "model",
        "dataset": {"path": "train.jsonl"},
        "rewards": [{"path": "rewards.py", "name": "short"}],
        "sampling": {"num_generations": 4, "max_completion_length": 30},
        "algorithm": {"prompts_per_step": 4, "learning_rate": 1e-3},
        "staleness": {"max_staleness": 0},
        "rollout": {"engine": "stub", "stub": {"step_s": 0.05, "mean_length": 20}},
        "checkpoint": {"every_steps": 1},
        "limits": {"max_steps": 6},
    }
    path = directory / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def step_of(client: Client, job: str) -> int:
    try:
        return int(client.get_job(job)["progress"]["step"])
    except RlharvestError:
        return -1


def test_it_comes_up_continues_its_jobs_and_leaves_no_process_after_sigterm_or_kill_9(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    up = start()
    client = up.until_ready()
    programs = json.loads(rlharvest("ps", "--json", "--data", up.data, cwd=tmp_path).stdout)["programs"]
    assert {one["name"] for one in programs} == PROGRAMS
    login = ("--url", client.url, "--token", client.token or "")
    submitted = rlharvest("submit", write_job(tmp_path), *login, cwd=tmp_path)
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    up.until(lambda: step_of(client, job) >= 1, "the first step")
    family = up.family()
    assert up.stop() == 0
    assert not alive(family)
    client.close()

    second = start()
    client = second.until_ready()
    second.until(lambda: step_of(client, job) >= 2, "the job to go on")
    services = psutil.Process(second.process.pid).children()
    family = second.family()
    second.process.kill()
    second.process.wait()
    end = time.monotonic() + 10
    while alive(family) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive(services)
    assert not alive(family)
    client.close()

    third = start()
    client = third.until_ready()
    watched = rlharvest("watch", job, *login, cwd=tmp_path)
    assert watched.returncode == 0, watched.stdout + third.text[-4000:]
    ended = client.get_job(job)
    assert (ended["status"], ended["progress"]["step"]) == ("succeeded", 6)
    client.close()
    family = third.family()
    assert third.stop() == 0
    assert not alive(family)
