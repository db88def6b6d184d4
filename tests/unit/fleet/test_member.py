"""The life of a worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rlharvest.fleet.member import ENDED, Member, Timing, WorkerState, beat, drain, forgive, join, leave, tick

TIMING = Timing(heartbeat_s=0.5, deadline_s=3.0)
REPORTS = st.sampled_from([WorkerState.JOINING, WorkerState.WARMING, WorkerState.READY, WorkerState.DRAINING])
EVENTS = st.one_of(
    st.tuples(st.just("beat"), st.integers(1, 2), REPORTS),
    st.tuples(st.just("wait"), st.floats(0, 4), st.none()),
    st.tuples(st.just("drain"), st.none(), st.none()),
    st.tuples(st.just("leave"), st.none(), st.none()),
)


@given(st.lists(EVENTS, max_size=30))
def test_dead_and_gone_never_change_and_strangers_change_nothing(events: list[tuple[str, float, WorkerState]]) -> None:
    member, now = join("w", 1, now=0.0), 0.0
    for kind, value, reported in events:
        before = member
        if kind == "beat":
            member = beat(member, int(value), reported, now=now)
            if value != 1:
                assert member == before
        elif kind == "wait":
            now += value
            member = tick(member, TIMING, now=now)
        elif kind == "drain":
            member = drain(member)
        else:
            member = leave(member)
        if before.state is WorkerState.DEAD:
            assert member.state is WorkerState.DEAD
        if before.state is WorkerState.GONE:
            assert member.state is WorkerState.GONE
        if before.state is WorkerState.DRAINING and member.state not in ENDED:
            assert member.state is WorkerState.DRAINING


def test_late_heartbeat_makes_suspect_then_dead_and_a_heartbeat_in_between_heals() -> None:
    member = beat(join("w", 1, now=0.0), 1, WorkerState.READY, now=0.0)
    assert tick(member, TIMING, now=1.0).state is WorkerState.READY
    suspect = tick(member, TIMING, now=1.5)
    assert suspect.state is WorkerState.SUSPECT
    assert beat(suspect, 1, WorkerState.READY, now=1.6).state is WorkerState.READY
    assert tick(suspect, TIMING, now=3.0).state is WorkerState.DEAD


def test_a_stall_of_the_coordinator_is_not_held_against_a_worker() -> None:
    member: Member = beat(join("w", 1, now=0.0), 1, WorkerState.READY, now=0.0)
    assert tick(forgive(member, 10.0), TIMING, now=10.5).state is WorkerState.READY
