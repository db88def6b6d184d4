"""What a connection to NATS says of itself while the server is away."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from rlharvest import bus
from rlharvest.repeats import Repeats
from rlharvest.testing.servers import NatsServer
from structlog.testing import capture_logs


@pytest.mark.timeout(120)
async def test_a_server_that_is_away_fills_no_log(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client tries several times a second; its log has the first try, and how many there were when it is back."""
    tries: Counter[str] = Counter()
    enough, back = asyncio.Event(), asyncio.Event()

    class Heard(Repeats):
        def heard(self, kind: str, now: float) -> int:
            tries[kind] += 1
            if tries.total() == 5:
                enough.set()
            return super().heard(kind, 0.0)

    monkeypatch.setattr(bus, "Repeats", Heard)
    with capture_logs() as lines:
        client = await bus.connect(nats_server.url, "test", on_reconnect=back.set)
        nats_server.kill()
        async with asyncio.timeout(60):
            await enough.wait()
        await asyncio.to_thread(nats_server.start)
        async with asyncio.timeout(60):
            await back.wait()
        await client.close()
    errors = [line["times"] for line in lines if line["event"] == "nats.error"]
    (reconnected,) = [line for line in lines if line["event"] == "nats.reconnected"]
    assert errors == [1] * len(tries)
    assert sum(errors) + reconnected["more_errors"] == tries.total()
