"""The fold of a job's log: pure, deterministic, the only place where the ledger decides anything.

The same records in the same order give the same book, on the leader, on a standby, after a crash and in the simulator.
Invariants, whatever the records (property-tested):

- tokens of a response are appended without gap or repetition, by the attempt that owns it, never past its budget;
- a record that does not fit (a fenced attempt, an old epoch, an unknown handle) changes nothing but a counter;
- applying a record twice is the same as once;
- submitted = retired + dropped + live, in responses, at every point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from rlharvest.ledger.response import OWNED, Group, Response, State
from rlharvest.spans import Finish, Flush, Span
from rlharvest.v1 import ledger_pb2, scores_pb2, spans_pb2


class Ack(IntEnum):
    """What became of a span."""

    APPLIED = spans_pb2.ACK_STATUS_APPLIED
    """Everything below the length is in the ledger."""

    GAP = spans_pb2.ACK_STATUS_GAP
    """Tokens before it are missing: send again from the length."""

    FENCED = spans_pb2.ACK_STATUS_FENCED
    """Its attempt does not own the response."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one span."""

    handle: int
    attempt: int
    length: int
    ack: Ack
    finished: bool = False
    """The response ended with this span."""


@dataclass(slots=True)
class Book:
    """All live responses of one job."""

    job: str
    epoch: int = 0
    next_group: int = 0
    ended: bool = False
    groups: dict[int, Group] = field(default_factory=dict)
    responses: dict[int, Response] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    """Totals over the whole job; see docs/metrics.md."""
    touched: set[int] = field(default_factory=set)
    """Handles that changed since the store last asked."""

    def flush(self, flush: Flush) -> list[Outcome]:
        """Apply what a worker published; return what became of each span, in order."""
        outcomes = [self._span(span) for span in flush.spans]
        self.counters["flushes"] += 1
        return outcomes

    def _span(self, span: Span) -> Outcome:
        response = self.responses.get(span.handle)
        if response is None or response.attempt != span.attempt or span.attempt == 0:
            self.counters["fenced_tokens"] += len(span.ids)
            return Outcome(span.handle, span.attempt, response.length if response else 0, Ack.FENCED)
        if response.state not in OWNED:
            # It finished under this very attempt: a resend of what is there already.
            self.counters["duplicate_tokens"] += len(span.ids)
            return Outcome(span.handle, span.attempt, response.length, Ack.APPLIED)
        if span.offset > response.length:
            self.counters["gaps"] += 1
            return Outcome(span.handle, span.attempt, response.length, Ack.GAP)
        new = response.append(span)
        self.touched.add(span.handle)
        self.counters["generated_tokens"] += new
        self.counters["duplicate_tokens"] += len(span.ids) - new
        if new:
            response.state = State.STREAMING
            response.deaths = 0
        ends_here = span.finish is not Finish.NONE and span.end == response.length
        if ends_here or response.length >= response.budget:
            self._finish(response, span.finish if ends_here else Finish.LENGTH)
        return Outcome(
            span.handle, span.attempt, response.length, Ack.APPLIED, finished=response.state is State.FINISHED
        )

    def _finish(self, response: Response, finish: Finish) -> None:
        response.finish = finish
        response.state = State.FINISHED
        self.touched.add(response.handle)
        self.counters["finished"] += 1

    def score(self, result: scores_pb2.ScoreResult) -> bool:
        """Apply a reward; return whether it was news. One for other tokens than the response has now is not."""
        response = self.responses.get(result.handle)
        if response is None or response.state is not State.FINISHED or response.writer != result.attempt:
            self.counters["late_scores"] += 1
            return False
        response.score = result
        response.state = State.SCORED
        self.touched.add(response.handle)
        return True

    def transition(self, transition: ledger_pb2.Transition) -> list[ledger_pb2.Change]:
        """Apply a transition; return the changes of it that took effect, in order."""
        if transition.epoch < self.epoch:
            self.counters["fenced_transitions"] += 1
            return []
        self.epoch = transition.epoch
        return [change for change in transition.changes if self._change(change)]

    def _change(self, change: ledger_pb2.Change) -> bool:
        match change.WhichOneof("change"):
            case "begin":
                return True
            case "admit":
                return self._admit(change.admit)
            case "assign":
                return self._assign(change.assign)
            case "orphan":
                return self._orphan(change.orphan)
            case "conclude":
                response = self.responses.get(change.conclude.handle)
                if response is None or response.state is not State.PENDING:
                    return False
                self._finish(response, Finish(change.conclude.finish))
                return True
            case "drop":
                return self._leave(change.drop.group, "dropped")
            case "retire":
                return self._leave(change.retire.group, "retired")
            case "end":
                for ordinal in list(self.groups):
                    self._leave(ordinal, "dropped")
                news, self.ended = not self.ended, True
                return news
            case _:
                return False

    def _admit(self, admit: ledger_pb2.Admit) -> bool:
        # A gap means that the part of the log before it is gone with its groups; ordinals are still not used twice.
        if self.ended or admit.group < self.next_group or admit.n == 0 or admit.budget == 0:
            return False
        group = Group(admit.group, admit.first_handle, admit.n, admit.budget, admit.prompt, admit.data_epoch)
        if any(handle in self.responses for handle in group.handles):
            return False
        self.next_group = group.ordinal + 1
        self.groups[group.ordinal] = group
        for handle in group.handles:
            self.responses[handle] = Response(handle, group.ordinal, group.budget)
            self.touched.add(handle)
        self.counters["submitted"] += group.n
        return True

    def _assign(self, assign: ledger_pb2.Assign) -> bool:
        response = self.responses.get(assign.handle)
        serial = assign.attempt & 0xFFFFFFFF
        if response is None or response.state is not State.PENDING or serial <= response.serial:
            return False
        response.state = State.ASSIGNED
        response.attempt = assign.attempt
        response.serial = serial
        response.worker = assign.worker
        response.incarnation = assign.incarnation
        response.assigned_length = response.length
        self.touched.add(response.handle)
        self.counters["assigned"] += 1
        if response.orphaned:
            self.counters["reassigned"] += 1
            self.counters["salvaged_tokens"] += response.length
        return True

    def _orphan(self, orphan: ledger_pb2.Orphan) -> bool:
        response = self.responses.get(orphan.handle)
        if response is None or response.state not in OWNED or response.attempt != orphan.attempt:
            return False
        if orphan.reason == ledger_pb2.ORPHAN_REASON_DEAD and response.length == response.assigned_length:
            response.deaths += 1
        response.state = State.PENDING
        response.attempt = 0
        response.worker = ""
        response.incarnation = 0
        response.orphaned += 1
        self.touched.add(response.handle)
        self.counters["orphaned"] += 1
        self.counters["regenerated_tokens"] += orphan.unpublished
        return True

    def _leave(self, ordinal: int, counter: str) -> bool:
        group = self.groups.pop(ordinal, None)
        if group is None:
            return False
        for handle in group.handles:
            del self.responses[handle]
            self.touched.add(handle)
        self.counters[counter] += group.n
        return True

    def of(self, group: Group) -> Iterator[Response]:
        """The responses of a group."""
        return (self.responses[handle] for handle in group.handles)

    def owned_by(self, worker: str, incarnation: int) -> Iterator[Response]:
        """The responses that this incarnation of a worker owns."""
        return (
            response
            for response in self.responses.values()
            if response.state in OWNED and response.worker == worker and response.incarnation == incarnation
        )
