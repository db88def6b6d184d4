"""A trainer process without bus and weight service, for tests that kill it: versions become lines of a file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from rlharvest import logs
from rlharvest.rpc import Client
from rlharvest.supervise import Supervisor
from rlharvest.weights.manifest import Manifest, describe
from rlharvest_trainer.compute import Compute
from rlharvest_trainer.coordinator import Coordinator
from rlharvest_trainer.run import Surroundings
from rlharvest_trainer.service import Service
from rlharvest_trainer.settings import TrainerSettings
from rlharvest_trainer.versions import Version


class FilePublications:
    """Publications that are lines of a file, so that they outlive the process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    async def publish(
        self, directory: Path, *, job: str, key: str, step: int, parent: int | None, tokenizer_digest: str, least: int
    ) -> Version:
        return self.record(directory, job, key, step, parent, least)

    def record(self, directory: Path, job: str, key: str, step: int, parent: int | None, least: int = 0) -> Version:
        files = tuple(describe(path) for path in sorted(directory.iterdir()))
        digest = Manifest(job=job, version=0, step=step, files=files).digest
        lines = self.lines()
        for line in lines:
            if line["key"] == key:
                return Version(int(str(line["version"])), str(line["digest"]))
        with self.path.open("a") as file:
            number = max(len(lines), least)
            record = {"version": number, "digest": digest, "key": key, "step": step, "parent": parent}
            file.write(json.dumps(record) + "\n")
        return Version(number, digest)

    async def newest(self, job: str) -> Version | None:
        lines = self.lines()
        return Version(int(str(lines[-1]["version"])), str(lines[-1]["digest"])) if lines else None


class SilentNotices:
    """Notices that nobody hears: groups are found by polling."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, object]]] = []

    @asynccontextmanager
    async def wakeups(self, job: str) -> AsyncIterator[asyncio.Event]:
        yield asyncio.Event()

    async def event(self, job: str, level: str, kind: str, message: str, data: Mapping[str, object]) -> None:
        self.events.append((level, kind, dict(data)))


async def serve(address: str, directory: Path) -> None:
    """Train whatever the coordinator at `address` gives, until SIGTERM."""
    supervisor = Supervisor("trainer", grace_s=20)
    compute = Compute(1)
    service = Service(
        Surroundings(
            settings=TrainerSettings(
                trainer="t", threads=1, device="cpu", data_dir=directory, poll_s=0.02, claim_wait_s=1.0
            ),
            coordinator=Coordinator(Client(address)),
            publications=FilePublications(directory / "versions.jsonl"),
            notices=SilentNotices(),
            compute=compute,
            supervisor=supervisor,
        )
    )
    supervisor.on_stop(service.stop)
    supervisor.spawn("jobs", service.run())
    await supervisor.run()
    compute.close()


def main(address: str, directory: str) -> None:
    """Entry point of the process."""
    logs.configure("trainer")
    asyncio.run(serve(address, Path(directory)))
