"""Who loses its owner and what is looked at: found by the index, the same as by a look at every response."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.fleet import member as life
from rlharvest.fleet.member import WorkerState
from rlharvest.ledger.book import Book
from rlharvest.ledger.response import OWNED, Response, attempt_of
from rlharvest.policies import dispatch
from rlharvest.spans import Finish, Flush, Run, Span, as_ids, as_logprobs, pack, read
from rlharvest.testing.clock import FakeClock
from rlharvest.v1 import fleet_pb2, ledger_pb2
from rlharvest_coordinator.courier import Courier
from rlharvest_coordinator.dispatcher import STALL_LOOK_S, Dispatcher
from rlharvest_coordinator.harvest import Harvest
from rlharvest_coordinator.history import History
from rlharvest_coordinator.roster import Seat
from rlharvest_coordinator.scope import Scope

JOB = "rljob_x"
WORKERS = 3
EACH = 2
DEADLINE_S = 60.0


class Quiet(Courier):
    """Sends nothing."""

    def abort(self, seat: Any, responses: Any, *, flush: bool) -> None:
        pass


def seat_of(worker: str, incarnation: int, state: WorkerState, now: float) -> Seat:
    return Seat(
        member=replace(life.join(worker, incarnation, now=now), state=state),
        hostname="h",
        pid=1,
        worker_class="preemptible",
        worker_type="cpu",
        engines=("stub",),
        slots=EACH,
        numerics_key="",
        batch_invariant=True,
        joined_at=0.0,
    )


def setting() -> tuple[Dispatcher, Quiet, Book, FakeClock]:
    """Return a dispatcher of a book in which each worker owns EACH responses, and one response waits."""
    book = Book(JOB)
    n = WORKERS * EACH + 1
    changes = [ledger_pb2.Change(admit=ledger_pb2.Admit(group=0, first_handle=0, n=n, budget=10))]
    for handle in range(WORKERS * EACH):
        assign = ledger_pb2.Assign(handle=handle, attempt=attempt_of(1, 1), worker=f"w{handle // EACH}", incarnation=1)
        changes.append(ledger_pb2.Change(assign=assign))
    book.transition(ledger_pb2.Transition(epoch=1, number=1, changes=changes))
    clock = FakeClock()
    seats = {f"w{i}": seat_of(f"w{i}", 1, WorkerState.READY, clock.monotonic()) for i in range(WORKERS)}

    class Local(Scope):
        """A scope with nobody to reach."""

        def __init__(self) -> None:
            self.id, self.clock = JOB, clock
            self.keeper = cast(Any, SimpleNamespace(books={JOB: book}, epoch=1))
            self.roster = cast(Any, SimpleNamespace(seats=seats))
            self.spec = cast(
                Any,
                SimpleNamespace(
                    rollout=SimpleNamespace(progress_deadline_s=DEADLINE_S), sampling=SimpleNamespace(stop=[])
                ),
            )
            self.prepared = cast(Any, SimpleNamespace(tokenizer=SimpleNamespace(eos_ids=frozenset({1}))))

        def event(self, level: str, kind: str, message: str, data: dict[str, Any]) -> None:
            pass

    scope = Local()
    courier = Quiet(scope, History(scope))
    return Dispatcher(scope, courier, cast(Harvest, None)), courier, book, clock


def by_looking_at_all(dispatcher: Dispatcher, courier: Courier) -> dict[int, int]:
    """The rules of the loss of an owner, of one response after another."""
    scope, found = dispatcher.scope, {}
    for handle, response in scope.book.responses.items():
        seat = scope.seat(response)
        known = scope.roster.seats.get(response.worker)
        if response.state not in OWNED:
            continue
        if seat is None:
            joined = known is not None and known.incarnation > response.incarnation
            found[handle] = ledger_pb2.ORPHAN_REASON_REJOINED if joined else ledger_pb2.ORPHAN_REASON_DEAD
        elif seat.member.state is WorkerState.DEAD:
            found[handle] = ledger_pb2.ORPHAN_REASON_DEAD
        elif seat.member.state is WorkerState.GONE:
            found[handle] = ledger_pb2.ORPHAN_REASON_DRAINED
        elif (handle, response.attempt) in courier.refused:
            found[handle] = ledger_pb2.ORPHAN_REASON_REFUSED
        elif courier.missing[handle] >= 2:
            found[handle] = ledger_pb2.ORPHAN_REASON_MISSING
        elif scope.clock.monotonic() - courier.progress.get(handle, scope.clock.monotonic()) > DEADLINE_S:
            found[handle] = ledger_pb2.ORPHAN_REASON_STALLED
    return found


HANDLES = st.integers(0, WORKERS * EACH + 1)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([*WorkerState, None, "rejoined"]), min_size=WORKERS, max_size=WORKERS),
    st.sets(st.tuples(HANDLES, st.sampled_from([attempt_of(1, 1), attempt_of(1, 2)])), max_size=3),
    st.dictionaries(HANDLES, st.integers(1, 3), max_size=3),
    st.dictionaries(HANDLES, st.floats(0, 2 * DEADLINE_S), max_size=3),
)
def test_the_index_finds_whom_a_look_at_every_response_finds(
    states: list[Any], refused: set[tuple[int, int]], missing: dict[int, int], silent_s: dict[int, float]
) -> None:
    dispatcher, courier, book, clock = setting()
    now = clock.monotonic()
    for index, state in enumerate(states):
        seats = dispatcher.scope.roster.seats
        if state is None:
            del seats[f"w{index}"]
        else:
            rejoined = state == "rejoined"
            seats[f"w{index}"] = seat_of(f"w{index}", 1 + rejoined, WorkerState.READY if rejoined else state, now)
    courier.refused |= refused
    courier.missing.update(missing)
    courier.progress.update({handle: now - s for handle, s in silent_s.items()})
    wanted = by_looking_at_all(dispatcher, courier)
    found = {change.orphan.handle: change.orphan for change in dispatcher.orphans()}
    assert {handle: orphan.reason for handle, orphan in found.items()} == wanted
    assert all(orphan.attempt == book.responses[handle].attempt for handle, orphan in found.items())


def test_it_is_looked_for_silence_once_in_a_while_and_no_deadline_is_missed() -> None:
    dispatcher, courier, _, clock = setting()
    assert dispatcher.orphans() == []
    clock.advance(DEADLINE_S + 0.1)
    courier.progress[1] = clock.monotonic()
    silent = {change.orphan.handle for change in dispatcher.orphans()}
    assert silent == {0, 2, 3, 4, 5}
    assert dispatcher.orphans() == [], "it looked again at once"
    clock.advance(STALL_LOOK_S)
    assert {change.orphan.handle for change in dispatcher.orphans()} == silent


def test_a_refusal_of_an_attempt_that_is_over_is_forgotten() -> None:
    dispatcher, courier, book, _ = setting()
    courier.refused = {(0, attempt_of(1, 1))}
    changes = dispatcher.orphans()
    assert [change.orphan.handle for change in changes] == [0]
    assert dispatcher.orphans() == changes, "what is not in the log yet is due again"
    book.transition(ledger_pb2.Transition(epoch=1, number=2, changes=changes))
    assert dispatcher.orphans() == []
    assert courier.refused == set()


class Counting(Dispatcher):
    """Counts how often it looks whether tokens end a response."""

    looks = 0

    def _terminal(self, response: Response) -> Finish:
        self.looks += 1
        return super()._terminal(response)


def extended(book: Book, handle: int, ids: list[int], finish: Finish = Finish.NONE) -> None:
    """Give a response tokens of version 0."""
    response = book.responses[handle]
    data = b"".join(value.to_bytes(4, "little") for value in ids)
    span = Span(
        handle=handle,
        attempt=response.attempt,
        offset=response.length,
        ids=as_ids(data),
        logprobs=as_logprobs(bytes(len(data))),
        runs=(Run(len(ids), 0),),
        finish=finish,
    )
    book.flush(read(pack(Flush(worker=response.worker, incarnation=1, number=1, spans=(span,)))))


def orphaned(book: Book, handle: int, ids: list[int], serial: int = 1) -> None:
    """Give a response tokens, and take its owner away."""
    extended(book, handle, ids)
    change = ledger_pb2.Change(orphan=ledger_pb2.Orphan(handle=handle, attempt=attempt_of(1, serial)))
    book.transition(ledger_pb2.Transition(epoch=1, number=2, changes=[change]))


def test_a_waiting_response_is_concluded_if_its_tokens_end_it_and_looked_at_once_if_not() -> None:
    plain, courier, book, _ = setting()
    dispatcher = Counting(plain.scope, courier, plain.harvest)
    orphaned(book, 0, [5, 6])
    orphaned(book, 1, [5, 1])
    for _ in range(3):
        assert [change.conclude.handle for change in dispatcher.conclude()] == [1], "it is due until the log has it"
    assert dispatcher.looks == 1 + 3
    again = ledger_pb2.Assign(handle=0, attempt=attempt_of(1, 2), worker="w1", incarnation=1)
    book.transition(ledger_pb2.Transition(epoch=1, number=3, changes=[ledger_pb2.Change(assign=again)]))
    orphaned(book, 0, [1], serial=2)
    assert sorted(change.conclude.handle for change in dispatcher.conclude()) == [0, 1], "it has other tokens now"


def test_a_prompt_is_where_a_sibling_runs_or_ended_with_the_version_that_is_served() -> None:
    """Not where it was with another version, nor with a worker that died or joined anew since."""
    dispatcher, _, book, _ = setting()
    seats = dispatcher.scope.roster.seats
    for handle in (0, 1, 2, 3):
        extended(book, handle, [5], finish=Finish.EOS)
    assert homes(dispatcher) == {0: {"w2"}}, "those that ended theirs do not say what they serve"
    seats["w0"].heartbeat = fleet_pb2.Heartbeat(job=JOB, version=0)
    seats["w1"].heartbeat = fleet_pb2.Heartbeat(job=JOB, version=1)
    assert homes(dispatcher) == {0: {"w0", "w2"}}
    seats["w2"] = seat_of("w2", 2, WorkerState.READY, 0.0)
    assert homes(dispatcher) == {0: {"w0"}}


def homes(dispatcher: Dispatcher) -> dict[int, set[str]]:
    return dispatcher._homes([dispatch.Waiting(handle=WORKERS * EACH, prompt=0)])
