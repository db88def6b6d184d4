"""Messages between a run and its workers: assignments, aborts, acknowledgements.

Nothing here is truth: a message that is lost shows in the heartbeats, and the dispatcher acts on those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

import structlog
from nats.errors import Error as NatsError
from rlharvest.bus import subject
from rlharvest.jobs.model import Sampling
from rlharvest.ledger.book import Ack
from rlharvest.ledger.record import Effects
from rlharvest.ledger.response import OWNED, Response
from rlharvest.noise import response_seed
from rlharvest.spans import ids_bytes
from rlharvest.v1 import fleet_pb2, spans_pb2

from rlharvest_coordinator.data.tokenizer import Tokenizer
from rlharvest_coordinator.gateway.request import Ask
from rlharvest_coordinator.history import History
from rlharvest_coordinator.log import Entry
from rlharvest_coordinator.roster import Seat
from rlharvest_coordinator.scope import Scope

log = structlog.get_logger(__name__)

INLINE_BYTES = 256 << 10
"""Prompt and prefix of one assignment travel with it up to this size; larger ones are fetched by the worker."""

MESSAGE_BYTES = 768 << 10
"""Largest message of assignments."""

ACK_ROWS = 16_384
"""Rows of one acknowledgement, so that it fits into a message."""

REQUEST_S = 2.0
"""How long a worker may take to answer a request."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the responses of a group are sampled from, where a request says so and not the job."""

    prompt: bytes
    """Little-endian u32."""
    seed: int
    """64 bits; the seed of each response is made of it and of the response's place in the group."""
    sampling: fleet_pb2.Sampling


def sampling_of(given: Sampling | Ask, tokenizer: Tokenizer) -> fleet_pb2.Sampling:
    """Return what workers are told of how a job, or a request of the gateway, is sampled."""
    return fleet_pb2.Sampling(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=max(0, given.top_k),
        min_p=given.min_p,
        eos_ids=sorted(tokenizer.eos_ids),
        stop=given.stop,
        vocab=tokenizer.vocab,
    )


class Courier:
    """Sends, and remembers what was sent when."""

    def __init__(self, scope: Scope, history: History) -> None:
        self.scope = scope
        self.history = history
        self.sent: dict[int, tuple[int, float, int]] = {}
        """handle -> (attempt, when it was sent, beats of its worker at that time)."""
        self.refused: set[tuple[int, int]] = set()
        """(handle, attempt) that a worker did not take."""
        self.progress: dict[int, float] = {}
        """handle -> when its last token came, or when it was sent."""
        self.missing: Counter[int] = Counter()
        """handle -> heartbeats of its owner that did not show it."""
        self.asked: dict[int, Asked] = {}
        """group -> what was asked for, of those that are served; a group that is not here was another coordinator's."""

    def forget(self, handle: int) -> None:
        """The response left the ledger."""
        self.sent.pop(handle, None)
        self.progress.pop(handle, None)
        self.missing.pop(handle, None)

    async def acknowledge_all(self, entries: Sequence[tuple[Entry, Effects]]) -> None:
        """Tell workers what of their spans is in the ledger."""
        now = self.scope.clock.monotonic()
        told: dict[tuple[str, int], list[Effects]] = {}
        for entry, effects in entries:
            flush, acks = effects.flush, effects.outcomes.acks
            if flush is None:
                continue
            seat = self.scope.roster.seats.get(entry.who)
            if seat is not None and seat.incarnation == flush.incarnation:
                seat.numerics_key = flush.numerics_key or seat.numerics_key
            told.setdefault((entry.who, flush.incarnation), []).append(effects)
            applied = flush.handles
            if acks.count(Ack.APPLIED) < len(applied):
                applied = list(compress(applied, (ack is Ack.APPLIED for ack in acks)))
            self.progress.update(dict.fromkeys(applied, now))
        for (worker, incarnation), batch in told.items():
            for ack in _ledger_acks(incarnation, batch):
                await self.scope.nats.publish(subject("acks", self.scope.id, worker), ack.SerializeToString())

    def send(self, handles: Sequence[int]) -> None:
        """Send responses to their new owners."""
        by_seat: dict[str, list[Response]] = {}
        now = self.scope.clock.monotonic()
        for handle in handles:
            response = self.scope.book.responses.get(handle)
            seat = self.scope.seat(response) if response is not None else None
            if response is None or not self.known(response):
                continue
            if seat is not None and response.state in OWNED:
                self.sent[handle] = (response.attempt, now, seat.beats)
                self.progress[handle] = now
                self.missing.pop(handle, None)
                by_seat.setdefault(seat.id, []).append(response)
        for worker, responses in by_seat.items():
            seat = self.scope.roster.seats[worker]
            for message in self._messages(seat, responses):
                self.scope.later(self._request(seat, message))

    def known(self, response: Response) -> bool:
        """Whether there is anything to sample a response from."""
        return not response.served or response.group in self.asked

    def _messages(self, seat: Seat, responses: Sequence[Response]) -> Iterable[fleet_pb2.Assignments]:
        # A message has one sampling: that of the job, or that of a group which is served.
        usual = sampling_of(self.scope.spec.sampling, self.scope.prepared.tokenizer)
        alike: dict[int, list[Response]] = {}
        for response in responses:
            alike.setdefault(response.group if response.served else -1, []).append(response)
        for group, same in alike.items():
            sampling = self.asked[group].sampling if group in self.asked else usual
            batch: list[fleet_pb2.Assignment] = []
            size = 0
            for response in same:
                assignment = self._assignment(response)
                if batch and size + assignment.ByteSize() > MESSAGE_BYTES:
                    yield self._assignments(seat, sampling, batch)
                    batch, size = [], 0
                batch.append(assignment)
                size += assignment.ByteSize()
            yield self._assignments(seat, sampling, batch)

    def _assignments(
        self, seat: Seat, sampling: fleet_pb2.Sampling, batch: Sequence[fleet_pb2.Assignment]
    ) -> fleet_pb2.Assignments:
        return fleet_pb2.Assignments(
            epoch=self.scope.keeper.epoch,
            incarnation=seat.incarnation,
            sampling=sampling,
            assignments=batch,
            draft_sources=self.history.sources(one.group for one in batch),
        )

    def _source(self, response: Response) -> tuple[bytes, int]:
        """Return the prompt of a response, little-endian u32, and its seed."""
        group = self.scope.book.group(response.group)
        place = response.handle - group.first_handle
        if (asked := self.asked.get(response.group)) is not None:
            return asked.prompt, response_seed(asked.seed, 0, 0, place)
        seed = response_seed(self.scope.spec.sampling_seed, group.prompt, group.data_epoch, place)
        return ids_bytes(self.scope.prepared.dataset.prompt_ids(group.prompt)), seed

    def _assignment(self, response: Response) -> fleet_pb2.Assignment:
        prompt, seed = self._source(response)
        prefix = ids_bytes(response.ids)
        large = len(prompt) + len(prefix) > INLINE_BYTES
        return fleet_pb2.Assignment(
            handle=response.handle,
            attempt=response.attempt,
            group=response.group,
            seed=seed,
            budget=response.budget,
            prompt=b"" if large else prompt,
            prefix=b"" if large else prefix,
            prefix_length=response.length,
            prefix_by_reference=large,
            min_version=response.last_version or 0,
        )

    def prefix(self, handle: int, attempt: int, worker: str) -> fleet_pb2.GetPrefixReply | None:
        """Return the tokens of a response to its owner."""
        response = self.scope.book.responses.get(handle)
        if response is None or response.attempt != attempt or response.worker != worker or not self.known(response):
            return None
        return fleet_pb2.GetPrefixReply(prompt=self._source(response)[0], prefix=ids_bytes(response.ids))

    async def _request(self, seat: Seat, message: fleet_pb2.Assignments) -> None:
        try:
            answer = await self.scope.nats.request(
                subject("assign", self.scope.id, seat.id), message.SerializeToString(), timeout=REQUEST_S
            )
        except (TimeoutError, NatsError):
            return  # it shows in its heartbeats whether it has them
        reply = fleet_pb2.AssignReply.FromString(answer.data)
        refused = {item.handle for item in message.assignments} if not reply.accepted else set(reply.refused)
        if refused:
            log.info("worker.refused", job=self.scope.id, worker=seat.id, responses=len(refused), reason=reply.reason)
            self.refused |= {(item.handle, item.attempt) for item in message.assignments if item.handle in refused}
            self.scope.woken.set()

    def abort(self, seat: Seat, responses: Sequence[Response], *, flush: bool) -> None:
        """Tell a worker to stop responses; with `flush` it publishes what it has first."""
        self.abort_pairs(seat, [(response.handle, response.attempt) for response in responses], flush=flush)

    def abort_pairs(self, seat: Seat, pairs: Sequence[tuple[int, int]], *, flush: bool) -> None:
        """Tell a worker to stop (handle, attempt) pairs."""
        order = fleet_pb2.Abort(
            epoch=self.scope.keeper.epoch,
            incarnation=seat.incarnation,
            handle=[handle for handle, _ in pairs],
            attempt=[attempt for _, attempt in pairs],
            flush=flush,
        )
        self.scope.later(self.scope.nats.publish(subject("abort", self.scope.id, seat.id), order.SerializeToString()))

    def acknowledge(self, seat: Seat, response: Response) -> None:
        """Tell a worker again that the ledger has all of a response."""
        ack = spans_pb2.LedgerAck(
            incarnation=seat.incarnation,
            handle=[response.handle],
            attempt=[response.attempt],
            length=[response.length],
            status=[spans_pb2.ACK_STATUS_APPLIED],
        )
        self.scope.later(self.scope.nats.publish(subject("acks", self.scope.id, seat.id), ack.SerializeToString()))


def _ledger_acks(incarnation: int, batch: Sequence[Effects]) -> Iterator[spans_pb2.LedgerAck]:
    """Yield what a worker is told of its flushes: the last word on each (handle, attempt), which is all that it needs."""
    flushes = [(effects.flush, effects.outcomes) for effects in batch if effects.flush is not None]
    if len(flushes) == 1:
        # Nothing to look for: a fleet's flushes come from many workers in turn.
        flush, outcomes = flushes[0]
        handles, attempts, lengths, acks = flush.handles, flush.attempts, outcomes.lengths, outcomes.acks
    else:
        last: dict[tuple[int, int], tuple[int, Ack]] = {}
        for flush, outcomes in flushes:
            asked = zip(flush.handles, flush.attempts, strict=True)
            last.update(zip(asked, zip(outcomes.lengths, outcomes.acks, strict=True), strict=True))
        handles, attempts = [handle for handle, _ in last], [attempt for _, attempt in last]
        lengths, acks = [length for length, _ in last.values()], [ack for _, ack in last.values()]
    for at in range(0, len(handles), ACK_ROWS):
        part = slice(at, at + ACK_ROWS)
        yield spans_pb2.LedgerAck(
            incarnation=incarnation,
            handle=handles[part],
            attempt=attempts[part],
            length=lengths[part],
            status=acks[part],  # type: ignore[arg-type]  # an alias of the enumeration
        )
