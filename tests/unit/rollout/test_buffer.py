"""The buffer against a model ledger: whatever is lost on the way, the ledger ends with exactly what was produced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rlharvest.engine import EngineBroken
from rlharvest.spans import Finish, Flush, Run, Span, Tokens, pack, skip_runs
from rlharvest.v1 import spans_pb2
from rlharvest_rollout.buffer import AckOutcome, Buffer, Held

APPLIED, GAP, FENCED = spans_pb2.ACK_STATUS_APPLIED, spans_pb2.ACK_STATUS_GAP, spans_pb2.ACK_STATUS_FENCED
ROOM = 1 << 20


def span(handle: int, offset: int, n: int, *, version: int = 0, finish: Finish = Finish.NONE, attempt: int = 1) -> Span:
    ids = np.arange(offset, offset + n, dtype=np.uint32) + 1000 * handle
    runs = (Run(n, version),) if n else ()
    logprobs = np.full(n, -float(handle), np.float32)
    return Span(handle=handle, attempt=attempt, offset=offset, ids=ids, logprobs=logprobs, runs=runs, finish=finish)


class Ledger:
    """The rules of the ledger, for one attempt at a time."""

    def __init__(self) -> None:
        self.attempts: dict[int, int] = {}
        self.tokens: dict[int, Tokens] = {}
        self.finish: dict[int, Finish] = {}

    def apply(self, spans: list[Span]) -> list[tuple[int, int, int, int]]:
        acks = []
        for one in spans:
            have = self.tokens[one.handle]
            length = len(have.ids)
            if one.attempt != self.attempts[one.handle]:
                acks.append((one.handle, one.attempt, length, FENCED))
                continue
            if one.offset > length:
                acks.append((one.handle, one.attempt, length, GAP))
                continue
            skip = min(length - one.offset, len(one.ids))
            have.extend(
                Span(
                    handle=one.handle,
                    attempt=one.attempt,
                    offset=length,
                    ids=one.ids[skip:],
                    logprobs=one.logprobs[skip:],
                    runs=skip_runs(one.runs, skip),
                )
            )
            if one.finish is not Finish.NONE and one.end == len(have.ids):
                self.finish[one.handle] = one.finish
            acks.append((one.handle, one.attempt, len(have.ids), APPLIED))
        return acks


class BufferMachine(RuleBasedStateMachine):
    """Any interleaving of production, flushes, lost messages, lost and late acknowledgements, resends, fences."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = Buffer(limit_tokens=50)
        self.ledger = Ledger()
        self.produced: dict[int, Tokens] = {}
        self.ended: dict[int, Finish] = {}
        self.published: list[list[Span]] = []
        """Flushes that are durable, in order, not applied yet."""
        self.acks: list[tuple[int, int, int, int]] = []
        """Acknowledgements on their way, in order."""
        self.version = 0
        self.next_handle = 0
        self.next_attempt = 0

    def held(self) -> dict[int, int]:
        return {one.handle: one.attempt for one in self.buffer.held()}

    def assign(self, handle: int) -> None:
        """A new attempt goes on from the ledger's tokens."""
        self.next_attempt += 1
        self.ledger.attempts[handle] = self.next_attempt
        have = self.ledger.tokens[handle]
        self.produced[handle] = Tokens(list(have.ids), list(have.logprobs), list(have.runs))
        self.buffer.open(handle, self.next_attempt, len(have.ids))

    def running(self) -> list[int]:
        return [handle for handle in self.held() if handle not in self.ended]

    @precondition(lambda self: self.next_handle < 4)
    @rule()
    def admit(self) -> None:
        handle = self.next_handle
        self.next_handle += 1
        self.ledger.tokens[handle] = Tokens()
        self.assign(handle)

    @rule()
    def switch_version(self) -> None:
        self.version += 1

    @precondition(lambda self: self.running())
    @rule(data=st.data(), n=st.integers(0, 9), finish=st.booleans())
    def produce(self, data: st.DataObject, n: int, finish: bool) -> None:
        handle = data.draw(st.sampled_from(self.running()))
        if n == 0 and not finish:
            return
        have = self.produced[handle]
        new = span(
            handle,
            len(have.ids),
            n,
            version=self.version,
            finish=Finish.EOS if finish else Finish.NONE,
            attempt=self.held()[handle],
        )
        assert self.buffer.add(new) == n
        have.extend(new)
        if finish:
            self.ended[handle] = Finish.EOS

    @rule(room=st.sampled_from([60, 100, 200, ROOM]))
    def flush(self, room: int) -> None:
        spans = self.buffer.take(room)
        if spans:
            self.published.append(spans)
            self.buffer.confirm(spans)

    @rule()
    def probe(self) -> None:
        spans = self.buffer.probe()
        assert all(len(one.ids) <= 1 for one in spans)
        if spans:
            self.published.append(spans)
            self.buffer.confirm(spans)

    @precondition(lambda self: self.published)
    @rule()
    def fold(self) -> None:
        self.acks += self.ledger.apply(self.published.pop(0))

    @precondition(lambda self: self.published)
    @rule()
    def lose_a_message(self) -> None:
        """The log lost something that it had acknowledged."""
        self.published.pop(0)

    @precondition(lambda self: self.published)
    @rule()
    def lose_the_tail(self) -> None:
        """The log is new; the coordinator asks for everything again."""
        self.published.clear()
        self.buffer.resend()

    @precondition(lambda self: self.acks)
    @rule()
    def deliver_ack(self) -> None:
        self.buffer.acknowledge(*self.acks.pop(0))

    @precondition(lambda self: self.acks)
    @rule()
    def lose_ack(self) -> None:
        self.acks.pop(0)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def reassign(self, data: st.DataObject) -> None:
        """The coordinator took a response away and gave it back under a newer attempt."""
        self.assign(data.draw(st.sampled_from(self.running())))

    @invariant()
    def counts_add_up(self) -> None:
        entries = self.buffer._entries.values()
        assert self.buffer.tokens == sum(len(entry.ids) for entry in entries)
        assert self.buffer.unsent_tokens == sum(entry.end - entry.sent for entry in entries)
        assert self.buffer.full == (self.buffer.tokens >= 50)
        for entry in entries:
            assert entry.base <= entry.sent <= entry.end
            assert entry.base <= entry.published <= entry.end
            assert sum(run.n for run in entry.runs) == len(entry.ids) == len(entry.logprobs)

    @invariant()
    def the_ledger_is_a_prefix_of_what_was_produced(self) -> None:
        for handle, have in self.ledger.tokens.items():
            made = self.produced[handle]
            assert have.ids == made.ids[: len(have.ids)]
            assert have.logprobs == made.logprobs[: len(have.ids)]

    def teardown(self) -> None:
        """Once nothing is lost any more, everything arrives, and nothing is held that is finished."""
        for _ in range(40):
            while self.buffer.unsent:
                self.flush(ROOM)
            self.probe()
            while self.published:
                self.fold()
            while self.acks:
                self.deliver_ack()
        for handle, made in self.produced.items():
            assert self.ledger.tokens[handle] == made
            assert self.ledger.finish.get(handle) == self.ended.get(handle)
        assert self.buffer.tokens == 0
        assert set(self.held()) == set(self.produced) - set(self.ended)


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_message_never_exceeds_the_room_and_one_long_response_is_split():
    buffer = Buffer(10**9)
    buffer.open(1, 1, 0)
    for at in range(0, 5000, 5):
        buffer.add(span(1, at, 5, version=at))
    sizes, tokens = [], 0
    while spans := buffer.take(4000):
        sizes.append(len(pack(Flush(worker="w" * 30, incarnation=1, number=1, spans=tuple(spans)))))
        tokens += sum(len(one.ids) for one in spans)
    assert tokens == 5000
    assert max(sizes) <= 4000 + 60


def test_a_finished_response_is_held_until_the_ledger_has_all_of_it():
    buffer = Buffer(100)
    buffer.open(1, 1, 0)
    buffer.add(span(1, 0, 3, finish=Finish.LENGTH))
    assert buffer.running == 0
    spans = buffer.take(ROOM)
    buffer.acknowledge(1, 1, 3, APPLIED)
    assert buffer.held() == [Held(1, 1, 3)], "the finish has no PubAck yet"
    buffer.confirm(spans)
    assert buffer.held() == []


def test_an_acknowledgement_of_another_attempt_changes_nothing():
    buffer = Buffer(100)
    buffer.open(1, 7, 0)
    buffer.add(span(1, 0, 3, attempt=7))
    assert buffer.acknowledge(1, 6, 3, FENCED) is AckOutcome.NOTHING
    assert buffer.tokens == 3
    assert buffer.acknowledge(1, 7, 0, FENCED) is AckOutcome.FENCED
    assert (buffer.tokens, buffer.held()) == (0, [])


def test_a_gap_below_what_was_freed_gives_the_response_up():
    buffer = Buffer(100)
    buffer.open(1, 1, 0)
    buffer.add(span(1, 0, 5))
    buffer.confirm(buffer.take(ROOM))
    buffer.acknowledge(1, 1, 5, APPLIED)
    assert buffer.acknowledge(1, 1, 2, GAP) is AckOutcome.LOST
    assert buffer.held() == []


def test_a_closed_response_goes_when_its_tokens_are_durable():
    buffer = Buffer(100)
    buffer.open(1, 1, 0)
    buffer.add(span(1, 0, 5))
    buffer.close(1, 1)
    assert buffer.add(span(1, 5, 1)) == 0
    buffer.confirm(buffer.take(ROOM))
    assert buffer.held() == []


def test_a_gap_in_the_engines_tokens_is_a_broken_engine():
    buffer = Buffer(100)
    buffer.open(1, 1, 4)
    with pytest.raises(EngineBroken, match="from 5 on for response 1, which has 4"):
        buffer.add(span(1, 5, 1))
