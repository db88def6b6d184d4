"""A book as bytes, and back: one field for the job, one for each live response."""

from __future__ import annotations

from collections import Counter

from rlharvest.ledger.book import Book
from rlharvest.ledger.response import Group, Response, State
from rlharvest.ledger.transcript import Piece, Transcript
from rlharvest.spans import Finish, Run, ids_bytes, logprobs_bytes
from rlharvest.v1 import ledger_pb2, scores_pb2

JOB_FIELD = "job"


def dump_job(book: Book) -> bytes:
    """Return the snapshot field of the job itself."""
    return ledger_pb2.LiveJob(
        epoch=book.epoch,
        next_group=book.next_group,
        next_served=book.next_served,
        ended=book.ended,
        groups=[
            ledger_pb2.LiveGroup(
                ordinal=group.ordinal,
                first_handle=group.first_handle,
                n=group.n,
                budget=group.budget,
                prompt=group.prompt,
                data_epoch=group.data_epoch,
            )
            for group in (*book.groups.values(), *book.served.values())
        ],
        counters=dict(book.counters),
    ).SerializeToString()


def dump_response(response: Response) -> bytes:
    """Return the snapshot field of a response."""
    return ledger_pb2.LiveResponse(
        handle=response.handle,
        group=response.group,
        state=response.state.value,
        attempt=response.attempt,
        serial=response.serial,
        worker=response.worker,
        incarnation=response.incarnation,
        finish=response.finish.value,
        assigned_length=response.assigned_length,
        deaths=response.deaths,
        orphaned=response.orphaned,
        ids=ids_bytes(response.ids),
        logprobs=logprobs_bytes(response.logprobs),
        run_n=[run.n for run in response.runs],
        run_version=[run.version for run in response.runs],
        piece_n=[piece.n for piece in response.pieces],
        piece_attempt=[piece.attempt for piece in response.pieces],
        piece_worker=[piece.worker for piece in response.pieces],
        score=response.score.SerializeToString() if response.score is not None else b"",
    ).SerializeToString()


def load(job: str, fields: dict[str, bytes]) -> Book:
    """Return the book of a snapshot; no fields: an empty one."""
    book = Book(job)
    if JOB_FIELD not in fields:
        return book
    head = ledger_pb2.LiveJob.FromString(fields[JOB_FIELD])
    book.epoch, book.next_group, book.ended = head.epoch, head.next_group, head.ended
    book.next_served = max(book.next_served, head.next_served)
    book.counters = Counter(dict(head.counters))
    for group in head.groups:
        book.admit(Group(group.ordinal, group.first_handle, group.n, group.budget, group.prompt, group.data_epoch))
    for name, data in fields.items():
        if name != JOB_FIELD:
            book.add(_load_response(data, book))
    return book


def _load_response(data: bytes, book: Book) -> Response:
    saved = ledger_pb2.LiveResponse.FromString(data)
    response = Response(saved.handle, saved.group, book.group(saved.group).budget)
    response.state = State(saved.state)
    response.attempt = saved.attempt
    response.serial = saved.serial
    response.worker = saved.worker
    response.incarnation = saved.incarnation
    response.finish = Finish(saved.finish)
    response.assigned_length = saved.assigned_length
    response.deaths = saved.deaths
    response.orphaned = saved.orphaned
    runs = [Run(n, version) for n, version in zip(saved.run_n, saved.run_version, strict=True)]
    pieces = [
        Piece(n, attempt, worker)
        for n, attempt, worker in zip(saved.piece_n, saved.piece_attempt, saved.piece_worker, strict=True)
    ]
    response.transcript = Transcript.restore(saved.ids, saved.logprobs, runs, pieces)
    if saved.score:
        response.score = scores_pb2.ScoreResult.FromString(saved.score)
    return response
