"""Traces of three formats and made-up ones have as many places up as they say."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.errors import InvalidField
from rlharvest.simulator import market
from rlharvest.simulator.market import Change, Trace
from rlharvest.simulator.scenario import Generated, Market, Workers


def check(trace: Trace) -> None:
    """Changes are in order, and up and down alternate."""
    up: set[str] = set()
    for before, after in pairwise(trace.changes):
        assert before.at_s <= after.at_s
    for change in trace.changes:
        assert 0 <= change.at_s <= trace.seconds
        assert change.up == (change.place not in up)
        (up.add if change.up else up.discard)(change.place)


def at(trace: Trace, second: float) -> int:
    return sum(1 if change.up else -1 for change in trace.changes if change.at_s <= second)


ROWS = st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["add", "remove"]), st.sampled_from("abcdef")))


@settings(deadline=None)
@given(ROWS)
def test_events_are_set_operations(rows: list[tuple[int, str, str]]) -> None:
    trace = market.events([[str(1000 * ms), what, node] for ms, what, node in rows])
    check(trace)
    up: set[str] = set()
    for _, what, node in sorted(rows, key=lambda row: row[0]):
        (up.add if what == "add" else up.discard)(node)
    assert at(trace, 1e9) == len(up)


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.integers(0, 9))
def test_samples_have_their_counts(data: list[int], seed: int) -> None:
    points, seconds = market.samples({"metadata": {"gap_seconds": 300}, "data": data})
    trace = market.from_counts(points, seconds, random.Random(seed))
    check(trace)
    assert [at(trace, n * 300) for n in range(len(data))] == data
    assert trace.mean() == pytest.approx(sum(data) / len(data))
    assert trace == market.from_counts(points, seconds, random.Random(seed))


def test_files_of_each_format_are_told_apart(tmp_path: Path) -> None:
    events, counts, samples = tmp_path / "a.csv", tmp_path / "b.txt", tmp_path / "c.json"
    events.write_text("0,add,node1\n1000,add,node2\n480000,add,node1\n490000,remove,node1\n")
    # Rows of such files come out of order.
    counts.write_text("2021-12-10, 13:07:45, 3\n2021-12-10, 13:09:45, 1\n2021-12-10, 13:08:45, 5\n")
    samples.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [4, 0, 2]}))
    first, second, third = (market.read(path) for path in (events, counts, samples))
    assert [at(first, second) for second in (0, 1, 489, 490)] == [1, 2, 2, 1]
    assert [at(second, at_s) for at_s in (0, 60, 120)] == [3, 5, 1]
    assert [at(third, n * 600) for n in range(3)] == [4, 0, 2]
    assert third.seconds == 1800


@pytest.mark.parametrize(
    "text", ["hello", "1,2,3", '{"data": [1]}', '{"metadata": {"gap_seconds": 0}, "data": []}', ""]
)
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    spec = Market(trace=str(path), usd_per_hour="1", workers=Workers(device="x"))
    with pytest.raises(InvalidField, match=r"market\."):
        market.of(spec, 0)


@settings(deadline=None)
@given(st.integers(0, 12), st.floats(1, 100), st.floats(0, 60), st.floats(0, 40), st.floats(0, 1), st.integers(0, 99))
def test_made_up_traces_are_traces(places: int, up: float, down: float, storms: float, share: float, seed: int) -> None:
    spec = Generated(
        places=max(1, places), hours=2, up_minutes=up, down_minutes=down, storms_per_day=storms, storm_share=share
    )
    trace = market.generate(spec, random.Random(seed))
    check(trace)
    assert trace == market.generate(spec, random.Random(seed))
    assert max((n for _, n in trace.counts()), default=0) <= spec.places


@settings(deadline=None)
@given(ROWS, st.floats(0, 40), st.floats(1, 40))
def test_a_window_begins_with_what_is_up(rows: list[tuple[int, str, str]], start: float, seconds: float) -> None:
    trace = market.events([[str(1000 * ms), what, node] for ms, what, node in rows])
    part = trace.window(start, seconds)
    if part.seconds > 0:
        check(part)
        assert at(part, 0) == at(trace, start)


def test_a_share_keeps_whole_places() -> None:
    trace = Trace(tuple(Change(0.0, f"p{n}", True) for n in range(10)), 100.0)
    assert len(trace.sample(0.5, random.Random(3)).places) == 5
