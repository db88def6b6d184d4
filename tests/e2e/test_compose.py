"""The container form: `docker compose up`, a job through REST, more workers while it runs, `down`."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rlharvest.client import Client
from rlharvest.testing.model import questions, tiny_model
from rlharvest.testing.servers import free_port

pytestmark = [pytest.mark.compose, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-this-test"
SERVICES = {"nats", "valkey", "postgres", "coordinator", "weights", "reward", "trainer", "rollout"}


class Compose:
    """One project of the repository's compose file, on a free port and with a workspace of its own."""

    def __init__(self, workspace: Path) -> None:
        self.port = free_port()
        self.project = f"rlharvest-test-{os.getpid()}"
        self.environment = {
            **os.environ,
            "RLHARVEST_PORT": str(self.port),
            "RLHARVEST_WORKSPACE": str(workspace),
            "RLHARVEST_API_TOKEN": TOKEN,
            "RLHARVEST_SQL_PASSWORD": "a-password-of-this-test",
            "ROLLOUT_REPLICAS": "2",
        }
        self.client = Client(f"http://127.0.0.1:{self.port}", TOKEN)

    def __call__(self, *arguments: str, check: bool = True) -> str:
        command = ["docker", "compose", "--project-name", self.project, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}\n{self.logs()}")
        return done.stdout

    def logs(self) -> str:
        command = ["docker", "compose", "--project-name", self.project, "logs", "--no-color", "--tail", "40"]
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout[-12000:]

    def containers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self("ps", "--all", "--format", "json").splitlines() if line]

    def until(self, condition: Callable[[], bool], what: str, *, timeout_s: float = 180.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"waited {timeout_s:g} s for {what}\n{self.logs()}"
            time.sleep(0.5)


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    workspace = tmp_path_factory.mktemp("workspace")
    tiny_model(workspace / "model")
    questions(workspace / "train.jsonl")
    for path in (workspace, *workspace.rglob("*")):  # the containers' user is not the one of this test
        path.chmod(0o755 if path.is_dir() else 0o644)
    project = Compose(workspace)
    try:
        project("up", "--detach", "--build", "--quiet-pull")
        yield project
    finally:
        project.client.close()
        project("down", "--volumes", "--timeout", "20", check=False)


def spec() -> dict[str, Any]:
    return {
        "name": "compose",
        "model": "/workspace/model",
        "dataset": {"path": "/workspace/train.jsonl"},
        "rewards": [{"builtin": "regex", "params": {"pattern": "[0-4]"}}],
        "sampling": {"num_generations": 4, "max_completion_length": 60},
        "algorithm": {"prompts_per_step": 8, "learning_rate": 1e-3},
        "staleness": {"max_staleness": 0},
        "rollout": {"engine": "stub", "stub": {"step_s": 0.1, "mean_length": 50}},
        "checkpoint": {"every_steps": 5},
        "limits": {"max_steps": 8},
    }


def test_everything_becomes_healthy(compose: Compose) -> None:
    def healthy() -> bool:
        found = compose.containers()
        ready = [one for one in found if one["Health"] == "healthy"]
        return {one["Service"] for one in ready} == SERVICES and len(ready) == len(SERVICES) + 1

    compose.until(healthy, "all containers to be healthy", timeout_s=300)
    migrate = [one for one in compose.containers() if one["Service"] == "migrate"]
    assert [one["ExitCode"] for one in migrate] == [0]


def test_only_the_api_is_published_and_only_on_loopback_with_a_token(compose: Compose) -> None:
    published = {
        (one["Service"], port["URL"], port["PublishedPort"])
        for one in compose.containers()
        for port in one["Publishers"] or []
        if port["PublishedPort"]
    }
    assert published == {("coordinator", "127.0.0.1", compose.port)}
    with (
        Client(f"http://127.0.0.1:{compose.port}", "wrong", retry_s=0) as stranger,
        pytest.raises(Exception, match="token"),
    ):
        stranger.workers()


def test_services_run_without_root_and_torch_is_only_where_it_is_needed(compose: Compose) -> None:
    probe = "import importlib.util, os; print(os.getuid(), importlib.util.find_spec('torch') is not None)"
    found = {
        service: compose("exec", "-T", service, "python", "-c", probe).split()
        for service in ("coordinator", "weights", "reward", "trainer", "rollout")
    }
    assert found == {
        "coordinator": ["10001", "False"],
        "weights": ["10001", "False"],
        "reward": ["10001", "False"],
        "trainer": ["10001", "True"],
        "rollout": ["10001", "True"],
    }


def test_a_job_goes_on_while_workers_are_added_and_succeeds(compose: Compose) -> None:
    job = compose.client.create_job(spec())["id"]
    compose.until(lambda: compose.client.get_job(job)["progress"]["step"] >= 1, "the first step")

    def ready() -> int:
        return sum(1 for one in compose.client.workers() if one["state"] == "ready" and one["job"] == job)

    assert ready() == 2
    compose("up", "--detach", "--no-recreate", "--no-build", "--scale", "rollout=3")
    compose.until(lambda: ready() == 3 or compose.client.get_job(job)["status"] != "running", "the third worker")
    during = compose.client.get_job(job)
    assert (during["status"], ready()) == ("running", 3), "the job ended before the third worker came"
    compose.until(lambda: compose.client.get_job(job)["status"] in ("succeeded", "failed"), "the end of the job")
    ended = compose.client.get_job(job)
    assert ended["status"] == "succeeded", ended["error"]
    assert ended["progress"]["step"] == 8
    assert ended["latest_checkpoint"].startswith("/checkpoints/")
    workers = {
        piece["worker"] for one in compose.client.samples(job, limit=200) for piece in pieces(compose, job, one["id"])
    }
    assert len(workers) == 3


def pieces(compose: Compose, job: str, response: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = compose.client.sample(job, response)["pieces"]
    return found


def test_down_leaves_nothing(compose: Compose) -> None:
    compose("down", "--volumes", "--timeout", "20")
    assert compose.containers() == []
