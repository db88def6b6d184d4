"""Streams of the gateway while what is behind them is killed: each is the uninterrupted completion."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from rlharvest.testing.served import Served, serving
from rlharvest.testing.system import System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STREAMS = 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with (
        System(tmp_path_factory.mktemp("system"), workers=4, slots=16) as system,
        serving(system, timeout_s=600, stub={"step_s": 0.02}) as served,
    ):
        yield served


def tokens(served: Served) -> int:
    return served.counters()["generated_tokens"]


def test_twenty_streams_lose_and_double_no_token_while_workers_are_killed_every_second(served: Served) -> None:
    """SIGKILL, each second, of the worker that holds the most; training's counters do not move."""
    with served.streams(STREAMS) as (over, streams):
        kills = served.kill_until(over)
    for stream in streams:
        stream.check()
    counters = served.counters()
    assert len(kills) >= 3, "the streams were over before anything was killed"
    assert counters["reassigned"] >= STREAMS / 2, counters
    assert counters["salvaged_tokens"] > 0, counters
    assert (counters["submitted"], counters["outstanding"]) == (2, 2), counters
    served.until_idle()
    counters = served.counters()
    assert counters["served_retired"] == counters["served_submitted"] == STREAMS, counters


def test_streams_go_on_when_log_and_store_are_killed(served: Served) -> None:
    """NATS from its files, NATS without its files, Valkey from its file: each while streams are in the middle."""
    system = served.system
    with served.streams(8) as (_, streams):
        system.until(lambda: served.counters()["served_submitted"] >= STREAMS + 8, timeout_s=60, what="8 streams")
        for empty in (False, True):
            before = tokens(served)
            system.until(lambda: tokens(served) > before + 100, timeout_s=60, what="more tokens")  # noqa: B023
            system.nats.kill()
            if empty:
                shutil.rmtree(system.nats.directory / "jetstream")
            system.nats.start()
        before = tokens(served)
        system.until(lambda: tokens(served) > before + 100, timeout_s=60, what="more tokens")
        system.valkey.kill()
        system.valkey.start()
    for stream in streams:
        stream.check()
