"""The engine without a system: samples the responses of a recorded job, as many at a time as its worker did.

Called as a process of its own: `python -m benchmarks.overhead.alone DIRECTORY`, with what `Recording.save` wrote; prints one
JSON line. The engine, its settings, prompts, seeds and budgets are those that a worker was given; a response that ends makes
room for the next one at once.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rlharvest.engine import Request
from rlharvest.spans import Finish
from rlharvest.v1 import fleet_pb2
from rlharvest_rollout.admission import request_of, sampling_of
from rlharvest_rollout.engine_catalog import make_engine
from rlharvest_rollout.lease import target_of
from rlharvest_rollout.settings import RolloutSettings

from benchmarks.overhead.pace import Pace


@dataclass(slots=True)
class Recording:
    """What a worker was told of one job."""

    model: Path
    lease: fleet_pb2.Lease | None = None
    assignments: list[fleet_pb2.Assignments] = field(default_factory=list)

    def save(self, directory: Path) -> None:
        """Write it into a new directory."""
        directory.mkdir()
        assert self.lease is not None, "a worker that was given responses had a lease"
        (directory / "model").write_text(str(self.model), encoding="utf-8")
        (directory / "lease").write_bytes(self.lease.SerializeToString())
        for number, message in enumerate(self.assignments):
            (directory / f"assignments.{number:05d}").write_bytes(message.SerializeToString())

    @classmethod
    def load(cls, directory: Path) -> Recording:
        """Return what `save` wrote."""
        return cls(
            Path((directory / "model").read_text(encoding="utf-8")),
            fleet_pb2.Lease.FromString((directory / "lease").read_bytes()),
            [fleet_pb2.Assignments.FromString(path.read_bytes()) for path in sorted(directory.glob("assignments.*"))],
        )

    def requests(self) -> Iterable[Request]:
        """Yield what the engine was asked for, in order, each response once."""
        seen = set()
        for message in self.assignments:
            sampling = sampling_of(message.sampling)
            for one in message.assignments:
                if one.handle not in seen:
                    seen.add(one.handle)
                    yield request_of(one, sampling, prompt=one.prompt, prefix=one.prefix)


async def sample(recording: Recording) -> Pace:
    """Return how fast the engine samples all responses of a recording."""
    settings = RolloutSettings()
    assert recording.lease is not None
    target = target_of(recording.lease, offered=settings.offered_engines, slots=settings.slots)
    if isinstance(target, str):
        raise SystemExit(target)
    engine = make_engine(target.engine, settings)
    await engine.start(target.config)
    await engine.load(recording.model, target.version)
    waiting = deque(recording.requests())
    left = len(waiting)
    pace = Pace()
    engine.submit([waiting.popleft() for _ in range(min(target.config.slots, left))])
    while left:
        spans = await engine.spans()
        pace.add(time.monotonic(), sum(len(span.ids) for span in spans))
        ended = sum(span.finish is not Finish.NONE for span in spans)
        left -= ended
        engine.submit([waiting.popleft() for _ in range(min(ended, len(waiting)))])
    await engine.close()
    return pace


if __name__ == "__main__":
    found = asyncio.run(sample(Recording.load(Path(sys.argv[1]))))
    print(json.dumps({"tokens": found.tokens, "per_s": found.per_s}))
