"""The overhead benchmark measures both sides alike, and gives the engine alone what the worker was given."""

from __future__ import annotations

import math
from pathlib import Path

from rlharvest.spans import ids_bytes
from rlharvest.v1 import fleet_pb2

from benchmarks.overhead.alone import Recording
from benchmarks.overhead.pace import Pace


def test_the_first_lot_only_starts_the_clock() -> None:
    pace = Pace()
    pace.add(9.0, 0)
    pace.add(10.0, 500)
    pace.add(11.0, 10)
    pace.add(14.0, 30)
    assert pace.tokens == 540
    assert pace.per_s == 10.0


def test_one_lot_has_no_pace() -> None:
    pace = Pace()
    assert math.isnan(pace.per_s)
    pace.add(1.0, 5)
    assert math.isnan(pace.per_s)


def test_a_recording_gives_each_response_once_in_order(tmp_path: Path) -> None:
    def assignment(handle: int) -> fleet_pb2.Assignment:
        return fleet_pb2.Assignment(handle=handle, attempt=1, seed=handle, budget=9, prompt=ids_bytes([1, 2]))

    sampling = fleet_pb2.Sampling(temperature=1.0, vocab=44)
    told = Recording(
        tmp_path / "model",
        fleet_pb2.Lease(job="rljob_x", engine="stub"),
        [
            fleet_pb2.Assignments(sampling=sampling, assignments=[assignment(3), assignment(1)]),
            fleet_pb2.Assignments(sampling=sampling, assignments=[assignment(1), assignment(2)]),
        ],
    )
    told.save(tmp_path / "recording")
    again = Recording.load(tmp_path / "recording")
    assert (again.model, again.lease) == (told.model, told.lease)
    requests = list(again.requests())
    assert [(request.handle, request.seed, request.budget) for request in requests] == [(3, 3, 9), (1, 1, 9), (2, 2, 9)]
    assert requests[0].prompt.tolist() == [1, 2]
    assert requests[0].sampling.vocab == 44
