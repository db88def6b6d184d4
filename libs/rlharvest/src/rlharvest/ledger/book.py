"""The fold of a job's log: pure, deterministic, the only place where the ledger decides anything.

The same records in the same order give the same book, on the leader, on a standby, after a crash and in the simulator.
Invariants, whatever the records (property-tested):

- tokens of a response are appended without gap or repetition, by the attempt that owns it, never past its budget;
- a record that does not fit (a fenced attempt, an old epoch, an unknown handle) changes nothing but a counter;
- applying a record twice is the same as once;
- submitted = retired + dropped + live, in responses, at every point, and the same of those that are served
  (served_submitted = served_retired + served_dropped + live): serving changes no counter of training's responses.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from rlharvest.ledger.index import Index
from rlharvest.ledger.response import FIRST_SERVED, MOST_HANDLES, OWNED, Group, Response, State
from rlharvest.spans import Columns, Finish
from rlharvest.v1 import ledger_pb2, scores_pb2, spans_pb2


class Ack(IntEnum):
    """What became of a span."""

    APPLIED = spans_pb2.ACK_STATUS_APPLIED
    """Everything below the length is in the ledger."""

    GAP = spans_pb2.ACK_STATUS_GAP
    """Tokens before it are missing: send again from the length."""

    FENCED = spans_pb2.ACK_STATUS_FENCED
    """Its attempt does not own the response."""


_APPLIED, _ASSIGNED, _STREAMING = Ack.APPLIED, State.ASSIGNED, State.STREAMING
"""Looked up once, not for each row."""


@dataclass(slots=True)
class Outcomes:
    """What became of the rows of a flush, in order, as columns."""

    lengths: list[int] = field(default_factory=list)
    """Tokens of the response after the row."""
    acks: list[Ack] = field(default_factory=list)


@dataclass(slots=True)
class Book:
    """All live responses of one job."""

    job: str
    epoch: int = 0
    next_group: int = 0
    next_served: int = FIRST_SERVED
    """Ordinal and first handle of the next group that is served."""
    ended: bool = False
    groups: dict[int, Group] = field(default_factory=dict)
    """Those that are trained, by ordinal."""
    served: dict[int, Group] = field(default_factory=dict)
    """Those that are served, by ordinal."""
    responses: dict[int, Response] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    """Totals over the whole job; see docs/metrics.md."""
    index: Index = field(default_factory=Index)
    """The same responses by state and owner."""
    tokens: int = 0
    """Of all live responses."""
    touched: set[int] = field(default_factory=set)
    """Handles whose state or owner changed since the store last asked."""

    def flush(self, columns: Columns) -> Outcomes:
        """Apply what a worker published; return what became of each row.

        Every token that a fleet samples comes through here, so a row makes no object and a counter is written once.
        """
        generated = duplicate = fenced = gaps = 0
        responses, worker = self.responses, sys.intern(columns.worker)
        lengths: list[int] = []
        # What is usual, so that only a row of which something else became has to say so.
        acks = [_APPLIED] * len(columns.handles)
        rows = zip(columns.handles, columns.attempts, columns.offsets, columns.counts, columns.finishes, strict=True)
        for row, (handle, attempt, offset, n, finish) in enumerate(rows):
            response = responses.get(handle)
            if response is None or response.attempt != attempt or not attempt or response.worker != worker:
                fenced += n
                lengths.append(response.length if response is not None else 0)
                acks[row] = Ack.FENCED
                continue
            transcript, state = response.transcript, response.state
            length = transcript.length
            if state is not _STREAMING and state is not _ASSIGNED:
                # It finished under this very attempt: a resend of what is there already.
                duplicate += n
            elif offset > length:
                gaps += 1
                acks[row] = Ack.GAP
            else:
                budget = response.budget
                new = transcript.append(columns, row, budget - length, response.worker)
                length += new
                generated += new
                duplicate += n - new
                if new and state is _ASSIGNED:
                    response.deaths = 0
                    self._move(response, State.STREAMING)
                if finish and offset + n == length:
                    self._finish(response, Finish(finish))
                elif length >= budget:
                    self._finish(response, Finish.LENGTH)
            lengths.append(length)
        self.tokens += generated
        self.counters["flushes"] += 1
        self.counters["generated_tokens"] += generated
        self.counters["duplicate_tokens"] += duplicate
        self.counters["fenced_tokens"] += fenced
        self.counters["gaps"] += gaps
        return Outcomes(lengths, acks)

    def _move(self, response: Response, state: State) -> None:
        """Put a response into another state, while the owner of the one that has an owner is noted."""
        self.index.remove(response)
        response.state = state
        self.index.add(response)
        self.touched.add(response.handle)

    def _finish(self, response: Response, finish: Finish) -> None:
        response.finish = finish
        self._move(response, State.FINISHED)
        if not response.served:
            self.counters["finished"] += 1

    def score(self, result: scores_pb2.ScoreResult) -> bool:
        """Apply a reward; return whether it was news. One for other tokens than the response has now is not."""
        response = self.responses.get(result.handle)
        if (
            response is None
            or response.served
            or response.state is not State.FINISHED
            or response.writer != result.attempt
        ):
            self.counters["late_scores"] += 1
            return False
        response.score = result
        self._move(response, State.SCORED)
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
                return self._leave(change.drop.group, "dropped", "served_dropped")
            case "retire":
                return self._leave(change.retire.group, "retired", "served_retired")
            case "end":
                for ordinal in [*self.groups, *self.served]:
                    self._leave(ordinal, "dropped", "served_dropped")
                news, self.ended = not self.ended, True
                return news
            case _:
                return False

    def _admit(self, admit: ledger_pb2.Admit) -> bool:
        group = Group(admit.group, admit.first_handle, admit.n, admit.budget, admit.prompt, admit.data_epoch)
        if self.ended or not self._fits(group) or any(handle in self.responses for handle in group.handles):
            return False
        if group.served:
            self.next_served = group.ordinal + group.n
            self.counters["served_submitted"] += group.n
        else:
            self.next_group = group.ordinal + 1
            self.counters["submitted"] += group.n
        self.admit(group)
        for handle in group.handles:
            self.add(Response(handle, group.ordinal, group.budget))
            self.touched.add(handle)
        return True

    def _fits(self, group: Group) -> bool:
        """Whether a group has ordinal and handles of its own."""
        if not group.n or not group.budget:
            return False
        # A gap means that the part of the log before it is gone with its groups; ordinals are still not used twice.
        if group.served:
            own = group.first_handle == group.ordinal >= self.next_served
            return own and group.handles.stop <= MOST_HANDLES
        return group.ordinal >= self.next_group and group.handles.stop <= FIRST_SERVED

    def _assign(self, assign: ledger_pb2.Assign) -> bool:
        response = self.responses.get(assign.handle)
        serial = assign.attempt & 0xFFFFFFFF
        if response is None or response.state is not State.PENDING or serial <= response.serial:
            return False
        response.attempt = assign.attempt
        response.serial = serial
        response.worker = sys.intern(assign.worker)  # compared with each row's: mostly the same object
        response.incarnation = assign.incarnation
        response.assigned_length = response.length
        self._move(response, State.ASSIGNED)
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
        self._move(response, State.PENDING)
        response.attempt = 0
        response.worker = ""
        response.incarnation = 0
        response.orphaned += 1
        self.counters["orphaned"] += 1
        self.counters["regenerated_tokens"] += orphan.unpublished
        return True

    def _leave(self, ordinal: int, trained: str, served: str) -> bool:
        """Forget a group, and count its responses under the name for those that are trained, or that are served."""
        group = self.groups.pop(ordinal, None) or self.served.pop(ordinal, None)
        if group is None:
            return False
        tokens = 0
        for handle in group.handles:
            response = self.responses.pop(handle)
            self.index.remove(response)
            tokens += response.length
            self.touched.add(handle)
        self.tokens -= tokens
        if group.served:
            self.counters["served_tokens"] += tokens
        self.counters[served if group.served else trained] += group.n
        return True

    def admit(self, group: Group) -> None:
        """Take a group in, without its responses."""
        (self.served if group.served else self.groups)[group.ordinal] = group

    def add(self, response: Response) -> None:
        """Take a response in as it is: a new one, or one of a snapshot."""
        self.responses[response.handle] = response
        self.index.add(response)
        self.tokens += response.length

    def group(self, ordinal: int) -> Group:
        """The live group of this ordinal."""
        return (self.served if ordinal >= FIRST_SERVED else self.groups)[ordinal]

    def of(self, group: Group) -> Iterator[Response]:
        """The responses of a group."""
        return (self.responses[handle] for handle in group.handles)
