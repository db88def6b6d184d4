"""A trap springs at its point, once, and nowhere else."""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.errors import InvalidField
from rlharvest.testing import points
from rlharvest.testing.faults import Point, Trap, Trigger, install, parse_trap, set_clock

names = st.from_regex(r"[a-z]{1,5}(\.[a-z]{1,5})?:[A-Z][a-z]{0,5}(\._?[a-z]{1,5})?", fullmatch=True)
traps = st.builds(
    Trap,
    st.sampled_from(["kill", "stop"]),
    st.sampled_from(["before", "after"]),
    st.lists(st.builds(Point, names, st.integers(1, 5)), min_size=1, max_size=3).map(tuple),
)


@given(traps)
def test_a_trap_survives_its_text(trap: Trap) -> None:
    assert parse_trap(str(trap)) == trap


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kill",
        "kill before",
        "hang before a:b",
        "kill during a:b",
        "kill before a.b",
        "kill before a:b@0",
        "skip after a:b",
    ],
)
def test_what_is_no_trap_is_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(InvalidField, match="module:name"):
        parse_trap(text)


@given(st.integers(1, 6), st.integers(1, 6), st.lists(st.sampled_from(["a:a", "b:b", "c:c"]), max_size=60))
def test_a_chain_springs_once_at_the_nth_pass_after_the_stage_before(first: int, second: int, calls: list[str]) -> None:
    trigger = Trigger(Trap("kill", "before", (Point("a:a", first), Point("b:b", second))))
    sprung = [index for index, name in enumerate(calls) if trigger.passed(name, "before")]
    armed = [index for index, name in enumerate(calls) if name == "a:a"][first - 1 : first]
    due = [index for index, name in enumerate(calls) if name == "b:b" and armed and index > armed[0]]
    assert sprung == due[second - 1 : second]


def test_every_point_of_a_worker_names_something() -> None:
    """So that the list cannot fall behind the code."""
    for stage in (
        points.JOINING,
        points.WARMING,
        points.GENERATING,
        points.DRAINING,
        points.FOLLOWING,
        points.CONTINUING,
    ):
        for trap in stage.values():
            parse_trap(trap)
    assert sum(map(len, (points.JOINING, points.WARMING, points.GENERATING, points.DRAINING, points.FOLLOWING))) >= 20


@pytest.fixture
def victim(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("victim")
    exec(
        "LIMIT = 5\ndef plain(x):\n    return x\nclass Thing:\n    async def wait(self, x):\n        return x\n",
        module.__dict__,
    )
    monkeypatch.setitem(sys.modules, "victim", module)
    return module


def test_a_call_is_left_out_once_and_a_number_is_replaced(victim: ModuleType) -> None:
    install("skip before victim:plain@2\nskip before victim:Thing.wait\nset victim:LIMIT 7\n")
    assert [victim.plain(1), victim.plain(2), victim.plain(3)] == [1, None, 3]
    thing = victim.Thing()
    assert [asyncio.run(thing.wait(1)), asyncio.run(thing.wait(2))] == [None, 2]
    assert victim.LIMIT == 7


def test_a_trap_that_names_nothing_is_an_error_at_once(victim: ModuleType) -> None:
    with pytest.raises(AttributeError):
        install("kill before victim:Thing.gone")
    with pytest.raises(ImportError):
        install("kill before nowhere:gone")


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_a_clock_file_holds_both_offsets(tmp_path_factory: pytest.TempPathFactory, wall: float, steady: float) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "clock"
    set_clock(path, wall_s=wall, monotonic_s=steady)
    read = [float(part) for part in path.read_text().split()]
    assert math.isclose(read[0], wall)
    assert math.isclose(read[1], steady)
