"""Which assignments a worker takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rlharvest.v1 import fleet_pb2
from rlharvest_rollout.admission import REMEMBERED, Admission, request_of, sampling_of


def message(*pairs: tuple[int, int], min_version: int = 0) -> fleet_pb2.Assignments:
    return fleet_pb2.Assignments(
        assignments=[fleet_pb2.Assignment(handle=h, attempt=a, min_version=min_version) for h, a in pairs]
    )


@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=4), max_size=12), st.integers(1, 4))
def test_no_attempt_starts_twice_none_goes_back_and_slots_hold(messages, slots):
    admission = Admission(slots)
    held: dict[int, int] = {}
    started: list[tuple[int, int]] = []
    for pairs in messages:
        verdict = admission.judge(message(*pairs), held=held, running=len(held), version=0)
        for one in verdict.take:
            assert one.attempt > max((a for h, a in started if h == one.handle), default=0)
            started.append((one.handle, one.attempt))
            held[one.handle] = one.attempt
        assert len(held) <= slots
        assert bool(verdict.refused) == bool(verdict.reason)
    assert len(set(started)) == len(started)


def test_what_is_remembered_does_not_grow_with_the_job():
    """Thousands of responses go through; an order that comes again late is known all the same."""
    admission = Admission(2)
    held = {1: 1}
    admission.judge(message((1, 1)), held={}, running=0, version=0)
    for handle in range(2, 2000):
        assert admission.judge(message((handle, 1)), held=held, running=1, version=0).take
        late = [(1, 1), *((other, 1) for other in range(max(2, handle - REMEMBERED), handle + 1))]
        assert not admission.judge(message(*late), held=held, running=1, version=0).take
    assert len(admission._newest) <= 2 + REMEMBERED * 2


def test_a_version_that_is_too_old_or_missing_is_refused():
    admission = Admission(4)
    assert admission.judge(message((1, 1)), held={}, running=0, version=None).refused == (1,)
    verdict = admission.judge(message((1, 1), min_version=3), held={}, running=0, version=2)
    assert (verdict.refused, verdict.reason) == ((1,), "version 2 is loaded, 3 is asked for")
    later = admission.judge(message((1, 1), min_version=3), held={}, running=0, version=3)
    assert len(later.take) == 1, "what was refused may come again under the same attempt"


def test_a_request_carries_what_the_wire_says():
    sampling = sampling_of(fleet_pb2.Sampling(temperature=0.5, top_p=1, eos_ids=[2, 3], stop=["x"], vocab=9))
    assert (sampling.temperature, sampling.eos_ids, sampling.stop, sampling.vocab) == (0.5, {2, 3}, ("x",), 9)
    one = fleet_pb2.Assignment(handle=1, attempt=2, group=3, seed=2**64 - 1, budget=5)
    request = request_of(one, sampling, prompt=b"\x01\0\0\0", prefix=b"")
    assert (request.prompt.tolist(), request.prefix.tolist(), request.seed) == ([1], [], 2**64 - 1)
