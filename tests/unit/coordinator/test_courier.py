"""What workers are told to sample: by the job, or by the request that a group answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from rlharvest.ledger.book import Book
from rlharvest.ledger.response import FIRST_SERVED, attempt_of
from rlharvest.noise import response_seed
from rlharvest.spans import ids_bytes
from rlharvest.testing.clock import FakeClock
from rlharvest.v1 import fleet_pb2, ledger_pb2
from rlharvest_coordinator.courier import Asked, Courier
from rlharvest_coordinator.history import History
from rlharvest_coordinator.scope import Scope

JOB, WORKER = "rljob_x", "wkr_x"


class Outbox(Courier):
    """Remembers what would be requested of workers."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope, History(scope))
        self.messages: list[fleet_pb2.Assignments] = []

    def _request(self, seat: Any, message: fleet_pb2.Assignments) -> Any:
        return message


def outbox_of(*groups: int) -> Outbox:
    """Return the courier of a book whose groups of two responses belong to one worker."""
    book = Book(JOB)
    changes = []
    for group in groups:
        first = group if group >= FIRST_SERVED else 2 * group
        changes.append(ledger_pb2.Change(admit=ledger_pb2.Admit(group=group, first_handle=first, n=2, budget=9)))
        for handle in (first, first + 1):
            assign = ledger_pb2.Assign(handle=handle, attempt=attempt_of(1, 1), worker=WORKER, incarnation=1)
            changes.append(ledger_pb2.Change(assign=assign))
    book.transition(ledger_pb2.Transition(epoch=1, number=1, changes=changes))
    seat = SimpleNamespace(id=WORKER, incarnation=1, beats=0)
    sampling = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, stop=["job"])
    scope: Any = SimpleNamespace(
        id=JOB,
        book=book,
        clock=FakeClock(),
        keeper=SimpleNamespace(epoch=1),
        roster=SimpleNamespace(seats={WORKER: seat}),
        seat=lambda response: seat,
        spec=SimpleNamespace(sampling=sampling, sampling_seed=5),
        prepared=SimpleNamespace(
            tokenizer=SimpleNamespace(eos_ids={1}, vocab=50),
            dataset=SimpleNamespace(prompt_ids=lambda row: [row + 7]),
        ),
    )
    found = Outbox(cast(Scope, scope))
    scope.later = found.messages.append
    return found


def test_a_message_has_one_sampling_and_a_served_group_its_own() -> None:
    outbox = outbox_of(0, FIRST_SERVED, FIRST_SERVED + 2)
    sampling = fleet_pb2.Sampling(temperature=0.5, stop=["own"])
    outbox.asked[FIRST_SERVED] = Asked(ids_bytes([30, 31]), 77, sampling)
    outbox.send([0, 1, FIRST_SERVED, FIRST_SERVED + 1, FIRST_SERVED + 2])
    job, own = sorted(outbox.messages, key=lambda message: message.assignments[0].handle)
    assert [one.handle for one in job.assignments] == [0, 1]
    assert (list(job.sampling.stop), job.assignments[0].prompt) == (["job"], ids_bytes([7]))
    assert job.assignments[1].seed == response_seed(5, 0, 0, 1)
    assert [one.handle for one in own.assignments] == [FIRST_SERVED, FIRST_SERVED + 1]
    assert own.sampling == sampling
    assert own.assignments[1].prompt == ids_bytes([30, 31])
    assert own.assignments[1].seed == response_seed(77, 0, 0, 1)


def test_nothing_is_sent_of_a_group_whose_request_another_coordinator_had() -> None:
    outbox = outbox_of(FIRST_SERVED)
    outbox.send([FIRST_SERVED])
    assert outbox.messages == []
    assert outbox.sent == {}
    assert outbox.prefix(FIRST_SERVED, attempt_of(1, 1), WORKER) is None


def test_a_worker_fetches_the_prompt_of_a_request() -> None:
    outbox = outbox_of(FIRST_SERVED)
    outbox.asked[FIRST_SERVED] = Asked(ids_bytes([30, 31]), 77, fleet_pb2.Sampling())
    reply = outbox.prefix(FIRST_SERVED, attempt_of(1, 1), WORKER)
    assert reply is not None
    assert (reply.prompt, reply.prefix) == (ids_bytes([30, 31]), b"")
