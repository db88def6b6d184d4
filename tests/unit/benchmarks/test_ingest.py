"""What the ingest benchmark publishes is what it compares with: a token that is missing or wrong is found."""

from __future__ import annotations

import pytest
from rlharvest.ledger.book import Book
from rlharvest.ledger.record import apply
from rlharvest.spans import pack, unpack
from rlharvest.v1 import ledger_pb2, spans_pb2

from benchmarks.ingest.load import EPOCH, Load, share
from benchmarks.ingest.rounds import beat_ms, round_ms

LOAD = Load("rljob_00000001", workers=3, live=4, span=16, length=64, waves=2)


def book_of(load: Load, *, most: int = 4096) -> Book:
    book = Book(load.job)
    for number, changes in enumerate(load.transitions(most), 1):
        assert len(changes) <= most
        book.transition(ledger_pb2.Transition(epoch=EPOCH, number=number, changes=changes))
    return book


def messages(load: Load) -> list[bytes]:
    return [payload for worker in range(load.workers) for payload in load.payloads(worker)]


@pytest.mark.parametrize("most", [5, 9, 4096])
def test_every_response_is_admitted_and_has_its_worker(most: int) -> None:
    book = book_of(LOAD, most=most)
    assert len(book.responses) == LOAD.responses == 24
    assert {len(book.index.owned_by(LOAD.worker(index), 1)) for index in range(3)} == {8}


def test_what_is_published_is_what_is_expected() -> None:
    book = book_of(LOAD)
    for payload in messages(LOAD):
        assert apply(book, "spans", payload).corrupt == ""
    assert LOAD.wrong(book) == 0
    assert book.counters["generated_tokens"] == LOAD.workers * LOAD.tokens == 3 * 2 * 4 * 64
    assert book.counters["finished"] == LOAD.responses


def test_messages_are_those_of_the_real_codec() -> None:
    payload = messages(LOAD)[0]
    assert pack(unpack(payload)) == payload
    assert len(messages(LOAD)) == LOAD.workers * LOAD.flushes


@pytest.mark.parametrize("fault", ["lost", "changed"])
def test_a_wrong_token_is_found(fault: str) -> None:
    book = book_of(LOAD)
    payloads = messages(LOAD)
    if fault == "lost":
        payloads.pop()
    else:
        message = spans_pb2.TokenSpans.FromString(payloads[-1])
        message.ids = bytes(4) + message.ids[4:]
        payloads[-1] = message.SerializeToString()
    for payload in payloads:
        apply(book, "spans", payload)
    assert LOAD.wrong(book) >= LOAD.length


def test_a_book_without_its_responses_is_all_wrong() -> None:
    assert LOAD.wrong(Book(LOAD.job)) == LOAD.workers * LOAD.tokens


def test_each_worker_is_simulated_once() -> None:
    assert sorted([*share(5, 2, 0), *share(5, 2, 1)]) == [0, 1, 2, 3, 4]


def test_a_round_with_nothing_to_do_proposes_nothing() -> None:
    """The keeper of the measured run takes no proposal, so a round that makes one fails."""
    small = Load("rljob_rounds", workers=3, live=4)
    assert len(round_ms(small, 3)) == 3
    assert len(beat_ms(small, 3)) == 3
