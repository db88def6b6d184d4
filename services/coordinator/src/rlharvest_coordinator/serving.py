"""The groups of a job that are served: from a request of the gateway to the last token that its client has been given.

They are groups of the ledger like any other, and so survive their workers. Invariants: a group is in the ledger until its
client has all of it or is gone, and no longer; what was given is never given again and never taken back; a group that nobody
here asked for (its client was lost with the coordinator before) is dropped. Nothing of a served group is in SQL.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlharvest.errors import LimitReached, RlharvestError, Unavailable
from rlharvest.fleet.member import ENDED
from rlharvest.ledger.record import Effects
from rlharvest.ledger.response import FIRST_SERVED, MOST_HANDLES, OWNED, Group
from rlharvest.policies import blame
from rlharvest.spans import Finish, Run
from rlharvest.v1 import ledger_pb2

from rlharvest_coordinator.courier import Asked, Courier
from rlharvest_coordinator.log import Entry
from rlharvest_coordinator.scope import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is new of one response."""

    place: int
    """Of the response in its group."""
    ids: list[int]
    logprobs: list[float]
    finish: Finish
    runs: tuple[Run, ...] = ()
    """Versions that sampled it, from its first token on."""


@dataclass(slots=True, kw_only=True, eq=False)
class Answer:
    """One group, as the client of a request has it."""

    asked: Asked
    n: int
    budget: int
    news: asyncio.Event
    """Set when there may be something to take; a request with several prompts shares it."""
    group: int | None = None
    """Ordinal in the ledger, once it was admitted."""
    given: list[list[int]] = field(default_factory=list)
    """Token ids of each response that were taken."""
    finished: set[int] = field(default_factory=set)
    """Places of the responses that were taken to their end."""
    unsure: set[int] = field(default_factory=set)
    """Places whose ledger came back from a recovery: what it has is compared with what was given."""
    failure: RlharvestError | None = None
    closed: bool = False
    complete: bool = False
    """It was closed because its client has all that it wants."""

    def fail(self, error: RlharvestError) -> None:
        """Nothing more will come."""
        if self.failure is None and not self.closed:
            self.failure = error
        self.news.set()


class Serving:
    """The served groups of one run."""

    def __init__(self, scope: Scope, courier: Courier) -> None:
        self.scope = scope
        self.courier = courier
        self._waiting: deque[Answer] = deque()
        """Not in the ledger yet, in order."""
        self._answers: dict[int, Answer] = {}
        """group -> its answer, from the proposal of its admission until it has left."""
        self._by_handle: dict[int, Answer] = {}
        self._leaving: dict[int, range] = {}
        """group -> handles, of those whose leaving was proposed."""
        self._next = FIRST_SERVED
        """No ordinal is proposed twice by one coordinator."""

    # --- what the gateway asks ----------------------------------------------------------------------------------------

    def ask(self, asked: Asked, *, n: int, budget: int, news: asyncio.Event) -> Answer:
        """Have `n` responses of at most `budget` tokens sampled; close the answer in any case."""
        answer = Answer(asked=asked, n=n, budget=budget, news=news, given=[[] for _ in range(n)])
        self._waiting.append(answer)
        self.scope.woken.set()
        return answer

    def take(self, answer: Answer) -> list[Delta]:
        """Return what is new of an answer since the last call.

        Raises:
            RlharvestError: nothing more will come.
        """
        if answer.failure is not None:
            raise answer.failure
        book = self.scope.book
        group = book.served.get(answer.group) if answer.group is not None else None
        deltas: list[Delta] = []
        for place, response in enumerate(book.of(group) if group is not None else ()):
            given = answer.given[place]
            if place in answer.finished or response.length < len(given):
                continue
            if place in answer.unsure:
                answer.unsure.discard(place)
                if response.ids[: len(given)].tolist() != given:
                    raise Unavailable("The ledger lost tokens that had been sent already; ask again.")
            finish = response.finish
            if response.length == len(given) and finish is Finish.NONE:
                continue
            ids, logprobs = response.transcript.since(len(given))
            given += ids.tolist()
            if finish is not Finish.NONE:
                answer.finished.add(place)
            deltas.append(
                Delta(
                    place=place,
                    ids=ids.tolist(),
                    logprobs=logprobs.tolist(),
                    finish=finish,
                    runs=response.runs,
                )
            )
        return deltas

    def close(self, answer: Answer, *, complete: bool) -> None:
        """Its client has all of it that it wants (`complete`), or is gone. Idempotent."""
        if answer.closed:
            return
        answer.closed, answer.complete = True, complete
        if answer.group is None and answer in self._waiting:
            self._waiting.remove(answer)
        self.scope.woken.set()

    def end(self, error: RlharvestError) -> None:
        """The job does not serve any more."""
        for answer in (*self._waiting, *self._answers.values()):
            answer.fail(error)

    # --- what the run tells -------------------------------------------------------------------------------------------

    def applied(self, entries: Iterable[tuple[Entry, Effects]]) -> None:
        """Wake those whose responses the log changed."""
        if not self._answers:
            return
        for _, effects in entries:
            handles: Sequence[int] = effects.flush.handles if effects.flush is not None else ()
            concluded = [change.conclude.handle for change in effects.changes if change.HasField("conclude")]
            for handle in (*handles, *concluded):
                if handle >= FIRST_SERVED and (answer := self._by_handle.get(handle)) is not None:
                    answer.news.set()

    def left(self, ordinal: int) -> range:
        """A group left the ledger; return the handles of its responses."""
        handles = self._leaving.pop(ordinal, range(0))
        self._forget(ordinal)
        return handles

    def recovered(self) -> None:
        """The book was taken from the store again."""
        for answer in self._answers.values():
            answer.unsure = set(range(answer.n)) - answer.finished
            answer.news.set()

    # --- what is due --------------------------------------------------------------------------------------------------

    def let_go(self) -> list[ledger_pb2.Change]:
        """Return the changes that take out of the ledger what nobody waits for, while no proposal is under way."""
        book = self.scope.book
        changes = []
        for ordinal, group in book.served.items():
            answer = self._answers.get(ordinal)
            if answer is not None and not answer.closed:
                deaths = max(response.deaths for response in book.of(group))
                if answer.failure is None and not blame.condemned(deaths):
                    continue
                answer.fail(Unavailable(f"{deaths} workers in a row died on this prompt before its next token."))
            self._abort(group)
            self._leaving[ordinal] = group.handles
            if answer is not None and answer.complete:
                changes.append(ledger_pb2.Change(retire=ledger_pb2.Retire(group=ordinal)))
            else:
                changes.append(ledger_pb2.Change(drop=ledger_pb2.Drop(group=ordinal)))
        return changes

    def _abort(self, group: Group) -> None:
        for response in self.scope.book.of(group):
            seat = self.scope.seat(response)
            if response.state in OWNED and seat is not None and seat.member.state not in ENDED:
                self.courier.abort(seat, [response], flush=False)

    def admit(self) -> list[ledger_pb2.Change]:
        """Return the changes that start new groups, while no proposal is under way."""
        book = self.scope.book
        if not self.scope.keeper.caught_up:
            return []  # the log may still hold groups of a coordinator before, with ordinals that are not to be used again
        for ordinal in [ordinal for ordinal in self._answers if ordinal not in book.served]:
            self._missed(ordinal)
        self._next = max(self._next, book.next_served)
        changes = []
        while self._waiting:
            answer = self._waiting.popleft()
            ordinal = self._next
            if ordinal + answer.n > MOST_HANDLES:
                answer.fail(LimitReached("completions of a job", MOST_HANDLES - FIRST_SERVED, "Start another job."))
                continue
            self._next += answer.n
            answer.group = ordinal
            self._answers[ordinal] = answer
            self._by_handle.update(dict.fromkeys(range(ordinal, ordinal + answer.n), answer))
            self.courier.asked[ordinal] = answer.asked
            admit = ledger_pb2.Admit(group=ordinal, first_handle=ordinal, n=answer.n, budget=answer.budget)
            changes.append(ledger_pb2.Change(admit=admit))
        return changes

    def _missed(self, ordinal: int) -> None:
        """A group that was proposed is not in the ledger: a recovery lost it, or its round was not made."""
        answer = self._forget(ordinal)
        if answer is None or answer.closed:
            return
        if any(answer.given):
            answer.fail(Unavailable("The ledger lost this completion; ask again."))
        else:
            answer.group = None
            self._waiting.append(answer)

    def _forget(self, ordinal: int) -> Answer | None:
        self.courier.asked.pop(ordinal, None)
        answer = self._answers.pop(ordinal, None)
        for handle in range(ordinal, ordinal + answer.n) if answer is not None else ():
            self._by_handle.pop(handle, None)
        return answer
