"""The whole system in a directory of its own, every service a real process, for tests that kill things.

Everybody shows tokens and credentials, as under `rlharvest up`; a test that speaks to NATS or Valkey itself takes
`system.nats.credential` and `system.valkey.url`, which may do everything.

Example::

    with System(tmp_path, workers=2) as system:
        job = system.submit({...})
        system.workers[0].kill()
        system.wait(job, "succeeded")
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from rlharvest.client import Client
from rlharvest.errors import RlharvestError, Unavailable
from rlharvest.keyring import REDIS_USER, Keyring
from rlharvest.testing.audit import check_job
from rlharvest.testing.model import questions, tiny_model
from rlharvest.testing.servers import NatsServer, ValkeyServer, free_port


class Service:
    """One service as a child process; `start` again after a kill gives a new process on the same files and ports."""

    def __init__(self, name: str, program: str, environment: dict[str, str], directory: Path) -> None:
        self.name = name
        self.program = program
        self.command = [os.fspath(Path(sys.executable).parent / program)]
        """What is started; rlharvest.testing.faults puts itself in front."""
        self.environment = environment
        self.directory = directory
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """What it writes."""
        return self.directory / f"{self.name}.log"

    def start(self, **environment: str) -> Service:
        """Start it, with more variables if they are given."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*self.command, "serve"],
                env={**os.environ, **self.environment, **environment},
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                cwd=self.directory,
            )
        return self

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        if self.process is not None:
            self.process.send_signal(number)

    def stop(self, *, timeout_s: float = 10.0) -> int:
        """SIGTERM it and return its exit status; SIGKILL after the time limit."""
        if self.process is None:
            return 0
        if self.running:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def tail(self, n: int = 3000) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-n:] if self.log.exists() else ""


class System:
    """NATS, Valkey, coordinator, weights, reward, trainer and workers."""

    def __init__(
        self,
        directory: Path,
        *,
        workers: int = 2,
        trainer: bool = True,
        sql_url: str = "",
        slots: int = 8,
        settings: dict[str, str] | None = None,
    ) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.keyring = Keyring(directory / "secrets")
        self.keyring.make()
        self.nats = NatsServer(directory / "nats", self.keyring)
        self.valkey = ValkeyServer(directory / "valkey", self.keyring)
        self.api_port, self.grpc_port, self.http_port, self.weights_port = (free_port() for _ in range(4))
        self.standby_ports = (free_port(), free_port())
        self.environment = {
            "RLHARVEST_NATS_URL": self.nats.url,
            "RLHARVEST_REDIS_URL": f"redis://{REDIS_USER}@127.0.0.1:{self.valkey.port}/0",
            "RLHARVEST_COORDINATOR_GRPC": ",".join(
                f"127.0.0.1:{port}" for port in (self.grpc_port, self.standby_ports[1])
            ),
            "RLHARVEST_WEIGHTS_URL": f"http://127.0.0.1:{self.http_port}",
            "RLHARVEST_WEIGHTS_GRPC": f"127.0.0.1:{self.weights_port}",
            "RLHARVEST_DATA_DIR": str(directory / "data"),
            "RLHARVEST_ROOTS": json.dumps([str(directory)]),
            "RLHARVEST_LOG_FORMAT": "console",
            "OMP_NUM_THREADS": "1",
            "RLHARVEST_THREADS": "1",
            **(settings or {}),
        }
        self.coordinator = self._service(
            "coordinator",
            "rlharvest-coordinator",
            RLHARVEST_API_PORT=str(self.api_port),
            RLHARVEST_GRPC_ADDRESS=f"127.0.0.1:{self.grpc_port}",
            RLHARVEST_SQL_URL=sql_url,
        )
        self.standby = self._service(
            "standby",
            "rlharvest-coordinator",
            RLHARVEST_API_PORT=str(self.standby_ports[0]),
            RLHARVEST_GRPC_ADDRESS=f"127.0.0.1:{self.standby_ports[1]}",
            RLHARVEST_SQL_URL=sql_url,
        )
        self.weights = self._service(
            "weights",
            "rlharvest-weights",
            RLHARVEST_HTTP_PORT=str(self.http_port),
            RLHARVEST_GRPC_ADDRESS=f"127.0.0.1:{self.weights_port}",
        )
        self.reward = self._service("reward", "rlharvest-reward")
        self.trainer = self._service("trainer", "rlharvest-trainer", RLHARVEST_TRAINER="trainer-0")
        self.has_trainer = trainer
        self.slots = slots
        self.workers = [self.worker(index) for index in range(workers)]
        self.client = self.api(self.api_port)

    def api(self, port: int) -> Client:
        """Return a client of the coordinator whose API is at this port."""
        return Client(f"http://127.0.0.1:{port}", self.keyring.token("api_token"))

    def metrics(self) -> str:
        """Return the coordinator's metrics as Prometheus reads them."""
        headers = {"Authorization": f"Bearer {self.keyring.token('api_token')}"}
        return (
            httpx.get(f"http://127.0.0.1:{self.api_port}/metrics", headers=headers, timeout=5).raise_for_status().text
        )

    def _service(self, name: str, program: str, **environment: str) -> Service:
        holder = self.keyring.path / program.removeprefix("rlharvest-")
        secrets = {"RLHARVEST_SECRETS_DIR": str(holder)}
        return Service(name, program, {**self.environment, **secrets, **environment}, self.directory)

    def worker(self, index: int, **environment: str) -> Service:
        """Return a rollout worker that is not started yet."""
        return self._service(
            f"rollout-{index}",
            "rlharvest-rollout",
            RLHARVEST_ENGINES="stub",
            RLHARVEST_SLOTS=str(self.slots),
            RLHARVEST_CACHE_DIR=str(self.directory / "cache" / str(index)),
            **environment,
        )

    @property
    def services(self) -> list[Service]:
        """All services, in the order in which they stop."""
        return [*self.workers, self.trainer, self.reward, self.weights, self.standby, self.coordinator]

    def __enter__(self) -> System:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def start(self) -> None:
        """Start everything and wait until the API answers."""
        self.nats.start()
        self.valkey.start()
        migrated = subprocess.run(
            [Path(sys.executable).parent / "rlharvest-coordinator", "migrate"],
            env={**os.environ, **self.coordinator.environment},
            capture_output=True,
            check=False,
        )
        if migrated.returncode:
            raise Unavailable(f"the database could not be migrated:\n{migrated.stderr.decode()[-2000:]}")
        for service in (self.coordinator, self.weights, self.reward, *self.workers):
            service.start()
        if self.has_trainer:
            self.trainer.start()
        self.ready()

    def ready(self, *, timeout_s: float = 180.0) -> None:
        """Wait until the coordinator leads."""
        url = f"http://127.0.0.1:{self.api_port}/readyz"

        def answers() -> bool:
            try:
                with urllib.request.urlopen(url, timeout=1) as reply:
                    return bool(reply.status == 200)
            except (urllib.error.URLError, OSError):
                return False

        self.until(answers, timeout_s=timeout_s, what="a coordinator that leads")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop everything."""
        for service in self.services:
            if service.running:
                service.signal(signal.SIGCONT)
                service.signal(signal.SIGTERM)
        for service in self.services:
            service.stop(timeout_s=5)
        self.client.close()
        self.nats.stop()
        self.valkey.stop()

    # --- jobs ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _inputs(self) -> tuple[Path, Path]:
        """Model and dataset, written once: a trainer may be reading them."""
        return tiny_model(self.directory / "model"), questions(self.directory / "train.jsonl")

    def spec(self, **changes: Any) -> dict[str, Any]:
        """Return a small job on the stub engine; sections in `changes` are merged into its own."""
        model, data = self._inputs
        spec: dict[str, Any] = {
            "name": "test",
            "model": str(model),
            "dataset": {"path": str(data)},
            "rewards": [{"builtin": "regex", "params": {"pattern": "[0-4]"}}],
            "sampling": {"num_generations": 4, "max_completion_length": 40},
            "algorithm": {"prompts_per_step": 4, "learning_rate": 1e-3},
            "staleness": {"max_staleness": 0},
            "rollout": {"engine": "stub", "stub": {"step_s": 0.01, "mean_length": 30}},
            "checkpoint": {"every_steps": 1},
            "limits": {"max_steps": 3},
        }
        for name, value in changes.items():
            spec[name] = {**spec[name], **value} if isinstance(value, dict) and name in spec else value
        return spec

    def submit(self, spec: dict[str, Any] | None = None) -> str:
        """Submit a job; return its id."""
        return str(self.client.create_job(spec or self.spec())["id"])

    def job(self, job: str) -> dict[str, Any]:
        """Return a job as the API shows it."""
        return dict(self.client.get_job(job))

    def wait(self, job: str, *statuses: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until a job has one of these statuses; return it."""
        self.until(
            lambda: self.job(job)["status"] in (*statuses, "failed"),
            timeout_s=timeout_s,
            what=f"job {job} to be {' or '.join(statuses)}",
        )
        found = self.job(job)
        if found["status"] not in statuses:
            raise AssertionError(f"job {job} failed: {found['error']}")
        return found

    def finish(self, job: str, spec: dict[str, Any], *, timeout_s: float = 300.0) -> dict[str, Any]:
        """Wait until a job has succeeded, compare every token with the uninterrupted run, and return it."""
        found = self.wait(job, "succeeded", timeout_s=timeout_s)
        check_job(spec, found, self.samples(job))
        return found

    def seat(self, worker: Service) -> dict[str, Any]:
        """Return what the API says of a worker's process, which may not have joined yet."""
        assert worker.process is not None
        found = [dict(seen) for seen in self.client.workers() if seen["pid"] == worker.process.pid]
        return found[0] if found else {"state": "absent", "held": 0, "incarnation": 0}

    def wait_joined(self, worker: Service, *, timeout_s: float = 180.0) -> None:
        """Wait until a worker's process has registered."""
        self.until(
            lambda: self.seat(worker)["state"] not in ("absent", "dead", "gone"),
            timeout_s=timeout_s,
            what=f"{worker.name} to join",
        )

    def wait_streaming(
        self,
        job: str,
        *,
        tokens: int = 5,
        responses: int = 2,
        worker: Service | None = None,
        timeout_s: float = 180.0,
    ) -> None:
        """Wait until responses are in the middle of their generation.

        Args:
            tokens: that each of them has, at least.
            worker: holds two of the job's responses then.
        """

        def streaming() -> bool:
            live = [sample for sample in self.client.live_samples(job) if sample["state"] == "streaming"]
            if sum(sample["length"] >= tokens for sample in live) < responses:
                return False
            return worker is None or self.seat(worker)["held"] >= 2

        self.until(streaming, timeout_s=timeout_s, what="responses in the middle of their generation")

    def until(self, done: Callable[[], bool], *, timeout_s: float, what: str) -> None:
        """Wait until `done` is true; when it is not in time, raise with the end of every log."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            try:
                if done():
                    return
            except RlharvestError:
                pass  # the coordinator is being restarted
            time.sleep(0.05)
        logs = "\n".join(f"--- {service.name}\n{service.tail()}" for service in self.services)
        raise AssertionError(f"waited {timeout_s:g} s for {what}\n{logs}")

    def samples(self, job: str) -> dict[int, dict[str, Any]]:
        """Return every finished response of a job with its tokens, by handle."""
        return {
            sample["handle"]: dict(self.client.sample(job, sample["id"]))
            for sample in self.client.samples(job, limit=1_000_000)
        }
