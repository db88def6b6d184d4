"""A stall is the longest silence of any stream that a kill falls into."""

from __future__ import annotations

import pytest
from rlharvest.testing.served import Expected, Streamed

from benchmarks.gateway import exact, stall


def streamed(started: float, *arrivals: float, ids: tuple[int, ...] = (1, 2)) -> Streamed:
    wanted = Expected([1, 2], [-1.0, -2.0], "ab", "stop")
    return Streamed(wanted, started, list(ids), [-1.0, -2.0], "ab", ["stop"], list(arrivals))


def test_the_silence_that_a_kill_is_in_counts() -> None:
    streams = [streamed(0.0, 1.0, 4.0, 5.0), streamed(0.0, 2.5, 3.0)]
    assert stall(streams, 1.5) == 3.0
    assert stall(streams, 0.5) == 2.5, "also the wait for the first chunk"
    assert stall(streams, 9.0) == 0.0, "nobody waited any more"


@pytest.mark.parametrize(("ids", "same"), [((1, 2), True), ((1, 2, 2), False), ((1,), False), ((1, 3), False)])
def test_a_stream_is_exact_or_not(ids: tuple[int, ...], same: bool) -> None:
    assert exact(streamed(0.0, 1.0, ids=ids)) == same
