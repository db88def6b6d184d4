"""The container form: `docker compose up`, one job that lives through whatever is done to its containers, `down`.

The tests run in order, on one project. The long one submits a job on the stub engine, whose tokens do not depend on the
weights, so that at its end each token can be compared with the uninterrupted run's.
"""

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
from rlharvest.errors import RlharvestError
from rlharvest.testing.audit import check_job
from rlharvest.testing.model import questions, tiny_model
from rlharvest.testing.servers import free_port

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-this-test-and-no-other"
OWN = {"coordinator", "weights", "reward", "trainer", "rollout"}
SERVICES = {"nats", "valkey", "postgres", *OWN}
MOST_BYTES = 2_000_000_000
"""Of an image without a GPU's libraries."""
PROMETHEUS = "prom/prometheus:v3.5.0"
STOP_S = 10.0
"""Most that `docker compose stop` takes, with a job under way, on a machine that has nothing else to do."""


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
            "RLHARVEST_SQL_PASSWORD": "a-password-of-this-test-and-no-other",
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

    def containers(self, service: str | None = None) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self("ps", "--all", "--format", "json").splitlines() if line]
        return [one for one in found if service in (None, one["Service"])]

    def scale(self, replicas: int) -> None:
        self("up", "--detach", "--no-recreate", "--no-build", "--scale", f"rollout={replicas}")

    def until(self, condition: Callable[[], bool], what: str, *, timeout_s: float = 600.0) -> None:
        end = time.monotonic() + timeout_s
        while True:
            try:
                if condition():
                    return
            except RlharvestError:
                pass  # the coordinator is being restarted, or what it needs is
            assert time.monotonic() < end, f"waited {timeout_s:g} s for {what}\n{self.logs()}"
            time.sleep(0.5)

    def until_healthy(self, workers: int) -> None:
        def healthy() -> bool:
            ready = [one["Service"] for one in self.containers() if one["Health"] == "healthy"]
            return set(ready) == SERVICES and len(ready) == len(SERVICES) - 1 + workers

        self.until(healthy, f"all containers to be healthy, {workers} workers among them", timeout_s=900)


def docker(*arguments: str, check: bool = True) -> bytes:
    return subprocess.run(["docker", *arguments], capture_output=True, check=check).stdout


def patience() -> float:
    """How many times as long as alone a busy machine may take."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


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
        project("--profile", "*", "down", "--volumes", "--timeout", "20", check=False)


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "name": "compose",
        "model": "/workspace/model",
        "dataset": {"path": "/workspace/train.jsonl"},
        "rewards": [{"builtin": "regex", "params": {"pattern": "[0-4]"}}],
        "sampling": {"num_generations": 4, "max_completion_length": 60},
        "algorithm": {"prompts_per_step": 8, "learning_rate": 1e-3},
        "staleness": {"max_staleness": 0},
        "rollout": {"engine": "stub", "stub": {"step_s": 0.08, "mean_length": 50}},
        "checkpoint": {"every_steps": 3},
        "limits": {"max_steps": 90},
        **changes,
    }


def test_everything_becomes_healthy(compose: Compose) -> None:
    compose.until_healthy(workers=2)
    once = {one["Service"]: one["ExitCode"] for one in compose.containers() if one["Service"] not in SERVICES}
    assert "migrate" in once
    assert set(once.values()) == {0}


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
    probe = (
        "import importlib.util, os; "
        "status = dict(line.split(':', 1) for line in open('/proc/self/status')); "
        "print(os.getuid(), importlib.util.find_spec('torch') is not None, status['CapEff'].strip('\\t0\\n') or 'none')"
    )
    found = {service: compose("exec", "-T", service, "python", "-c", probe).split() for service in OWN}
    torch = {"trainer", "rollout"}
    assert found == {service: ["10001", str(service in torch), "none"] for service in OWN}


def test_images_without_a_gpu_are_small_and_have_a_user(compose: Compose) -> None:
    for service in OWN:
        shown = docker("image", "inspect", "--format", "{{.Size}} {{.Config.User}}", f"rlharvest-{service}")
        size, user = shown.decode().split()
        assert int(size) < MOST_BYTES, f"rlharvest-{service} has {int(size) / 1e9:.2f} GB"
        assert user == "rlharvest"


def test_the_profiles_are_valid(compose: Compose) -> None:
    """There may be no GPU here; Compose accepts what is reserved."""
    shown = json.loads(compose("--profile", "gpu", "config", "--format", "json"))["services"]
    for name, device in (("trainer-gpu", "0"), ("rollout-gpu", "1")):
        (reserved,) = shown[name]["deploy"]["resources"]["reservations"]["devices"]
        assert reserved == {"driver": "nvidia", "device_ids": [device], "capabilities": ["gpu"]}
    compose("--profile", "*", "config", "--quiet")


def test_prometheus_finds_every_worker(compose: Compose) -> None:
    """By the network's DNS. A worker that comes later is found too."""
    if subprocess.run(["docker", "image", "inspect", PROMETHEUS], capture_output=True, check=False).returncode:
        pulled = subprocess.run(["docker", "pull", "--quiet", PROMETHEUS], capture_output=True, check=False)
        if pulled.returncode:
            pytest.skip(f"{PROMETHEUS} cannot be pulled here")
    compose("--profile", "monitoring", "up", "--detach", "--no-recreate", "--no-build", "--scale", "rollout=3")

    def up() -> list[str]:
        ask = ("exec", "-T", "prometheus", "promtool", "query", "instant", "--format", "json")
        text = compose("--profile", "monitoring", *ask, "http://127.0.0.1:9090", "up", check=False)
        found = json.loads(text) if text else []
        return sorted(one["metric"]["job"] for one in found if one["value"][1] == "1")

    wanted = ["coordinator", "reward", "rollout", "rollout", "rollout", "trainer", "weights"]
    compose.until(lambda: up() == wanted, f"Prometheus to see {wanted}")
    compose("--profile", "monitoring", "rm", "--stop", "--force", "prometheus")
    compose.scale(2)


def test_a_job_lives_through_everything(compose: Compose) -> None:
    """Scaled 2 → 4 → 1 → 3 → 2, workers killed and stopped, servers restarted, stopped and taken down, all while it runs."""
    job_spec = spec()
    job = compose.client.create_job(job_spec)["id"]

    def step() -> int:
        return int(compose.client.get_job(job)["progress"]["step"])

    def ready() -> int:
        return sum(1 for one in compose.client.workers() if one["state"] == "ready" and one["job"] == job)

    def goes_on(after: str) -> None:
        """It is not over, and makes two more steps: one may have been under way."""
        shown = compose.client.get_job(job)
        assert shown["status"] in ("queued", "running"), f"{after}: {shown['status']} {shown['error']}"
        at = step()
        compose.until(lambda: step() >= at + 2, f"two steps after {after}")

    compose.until(lambda: step() >= 1 and ready() == 2, "the first step")
    compose.scale(4)
    compose.until(lambda: ready() == 4, "four workers")
    compose.scale(1)
    compose.until(lambda: ready() == 1, "one worker")
    goes_on("scaling")

    compose.scale(3)
    compose.until(lambda: ready() == 3, "three workers")
    first, second, third = (one["ID"] for one in compose.containers("rollout"))
    docker("kill", "--signal", "KILL", first)
    # A crash: docker's restart policy starts it again. PID 1 of the container is its init.
    docker("exec", second, "python", "-c", "import os, signal; os.kill(-1, signal.SIGKILL)", check=False)
    docker("stop", third)
    compose.until(lambda: ready() == 1, "the crashed worker to be back")
    compose.scale(2)
    compose.until(lambda: ready() == 2, "two workers")
    goes_on("the loss of three workers")

    for server in ("nats", "valkey", "postgres"):
        compose("restart", server)
        goes_on(f"a restart of {server}")

    began = time.monotonic()
    compose("stop")
    took = time.monotonic() - began
    codes = {(one["Service"], one["ExitCode"]) for one in compose.containers()}
    assert {code for _, code in codes} == {0}, codes
    print(f"docker compose stop took {took:.1f} s")
    assert took < STOP_S * patience(), f"stopping took {took:.1f} s"
    compose("up", "--detach", "--no-build")
    compose.until_healthy(workers=2)
    goes_on("stop and up")

    compose("down")
    assert compose.containers() == []
    compose("up", "--detach", "--no-build")
    compose.until_healthy(workers=2)
    goes_on("down and up")

    compose.until(
        lambda: compose.client.get_job(job)["status"] in ("succeeded", "failed"), "the end of the job", timeout_s=1800
    )
    ended = compose.client.get_job(job)
    assert ended["status"] == "succeeded", ended["error"]
    assert ended["latest_checkpoint"].startswith("/checkpoints/")
    samples = {
        sample["handle"]: dict(compose.client.sample(job, sample["id"]))
        for sample in compose.client.samples(job, limit=1_000_000)
    }
    check_job(job_spec, ended, samples)


def test_a_backup_made_in_a_running_job_is_restored_into_new_volumes(compose: Compose, tmp_path: Path) -> None:
    job_spec = spec(limits={"max_steps": 20})
    job = compose.client.create_job(job_spec)["id"]
    compose.until(lambda: compose.client.get_job(job)["progress"]["step"] >= 4, "step 4")
    backup = tmp_path / "backup.tar"
    line = ["docker", "compose", "--project-name", compose.project, "run", "--rm", "-T"]
    with backup.open("wb") as file:
        subprocess.run([*line, "backup"], cwd=ROOT, env=compose.environment, stdout=file, check=True)
    compose.until(lambda: compose.client.get_job(job)["progress"]["step"] >= 6, "step 6")
    compose("down", "--volumes")
    with backup.open("rb") as file:
        subprocess.run([*line, "restore"], cwd=ROOT, env=compose.environment, stdin=file, check=True)
    compose("up", "--detach", "--no-build")
    compose.until(lambda: compose.client.get_job(job)["status"] in ("succeeded", "failed"), "its end", timeout_s=600)
    ended = compose.client.get_job(job)
    assert ended["status"] == "succeeded", ended["error"]
    samples = {
        sample["handle"]: dict(compose.client.sample(job, sample["id"]))
        for sample in compose.client.samples(job, limit=1_000_000)
    }
    check_job(job_spec, ended, samples)


def test_down_leaves_nothing(compose: Compose) -> None:
    compose("--profile", "*", "down", "--volumes", "--timeout", "20")
    assert compose.containers() == []
    assert docker("volume", "ls", "--quiet", "--filter", f"label=com.docker.compose.project={compose.project}") == b""
