"""Which response should be where: takes back what lost its owner, admits groups, gives what waits to who is free.

Decisions come from rlharvest.policies; this is what feeds them from the book, the roster and the courier, and turns their
answers into changes for the log.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias

from rlharvest.fleet.member import ENDED, WorkerState
from rlharvest.ledger.response import OWNED, Response, State, attempt_of, epoch_of
from rlharvest.policies import blame, dispatch
from rlharvest.spans import Finish
from rlharvest.terminal import terminal
from rlharvest.v1 import ledger_pb2

from rlharvest_coordinator.courier import Courier
from rlharvest_coordinator.harvest import Harvest
from rlharvest_coordinator.roster import Seat
from rlharvest_coordinator.scope import Scope

Reason: TypeAlias = ledger_pb2.OrphanReason.ValueType

STALL_LOOK_S = 1.0
"""How often it is looked for responses that stand still."""

PAUSE_GRACE_S = 3.0
"""How long a worker may take to publish what it has when its job pauses."""


class Dispatcher:
    """Moves the responses of one job."""

    def __init__(self, scope: Scope, courier: Courier, harvest: Harvest) -> None:
        self.scope = scope
        self.courier = courier
        self.harvest = harvest
        self._aborted_at: float | None = None
        """When the workers were asked to let go of a job that pauses."""
        self._looked_at = -1e9
        """When it was looked for responses that stand still."""
        self._going_on: dict[int, int] = {}
        """handle -> attempts so far, of waiting responses whose tokens do not end them."""

    def going_on(self) -> None:
        """The job runs: nothing is being handed back."""
        self._aborted_at = None

    def orphans(self) -> list[ledger_pb2.Change]:
        """Return the changes that take responses back from owners that are gone, refuse, stall, or do not hold them."""
        changes = []
        for response, reason in self._lost().values():
            changes.append(_orphan(response, reason, self._unpublished(response)))
            self.courier.missing.pop(response.handle, None)
            seat = self.scope.seat(response)
            if seat is not None and seat.member.state not in ENDED:
                self.courier.abort(seat, [response], flush=False)
        if changes:
            self._tell_orphans(changes)
        return changes

    def _lost(self) -> dict[int, tuple[Response, Reason]]:
        """Return the responses that must be taken from their owners, by handle."""
        book = self.scope.book
        lost: dict[int, tuple[Response, Reason]] = {}
        for (worker, incarnation), responses in book.index.owners().items():
            if (reason := self._gone(worker, incarnation)) is not None:
                lost |= {handle: (response, reason) for handle, response in responses.items()}
        refused = {(handle, attempt) for handle, attempt in self.courier.refused if self._owned(handle, attempt)}
        self.courier.refused = refused
        singly: list[tuple[int, Reason]] = [(handle, ledger_pb2.ORPHAN_REASON_REFUSED) for handle, _ in refused]
        singly += [(handle, ledger_pb2.ORPHAN_REASON_MISSING) for handle, n in self.courier.missing.items() if n >= 2]
        singly += [(handle, ledger_pb2.ORPHAN_REASON_STALLED) for handle in self._stalled()]
        for handle, reason in singly:
            response = book.responses.get(handle)
            if response is not None and response.state in OWNED:
                lost.setdefault(handle, (response, reason))
        return lost

    def _gone(self, worker: str, incarnation: int) -> Reason | None:
        """Return why this incarnation of a worker owns nothing any more."""
        seat = self.scope.roster.seats.get(worker)
        if seat is None or seat.incarnation != incarnation:
            rejoined = seat is not None and seat.incarnation > incarnation
            return ledger_pb2.ORPHAN_REASON_REJOINED if rejoined else ledger_pb2.ORPHAN_REASON_DEAD
        if seat.member.state is WorkerState.DEAD:
            return ledger_pb2.ORPHAN_REASON_DEAD
        return ledger_pb2.ORPHAN_REASON_DRAINED if seat.member.state is WorkerState.GONE else None

    def _owned(self, handle: int, attempt: int) -> bool:
        response = self.scope.book.responses.get(handle)
        return response is not None and response.state in OWNED and response.attempt == attempt

    def _stalled(self) -> list[int]:
        """Return the responses without a new token for too long. It takes a look at all of them, so not in every round."""
        now, deadline = self.scope.clock.monotonic(), self.scope.spec.rollout.progress_deadline_s
        if now - self._looked_at < min(STALL_LOOK_S, deadline / 4):
            return []
        self._looked_at = now
        progress = self.courier.progress
        return [item.handle for item in self.scope.owned() if now - progress.setdefault(item.handle, now) > deadline]

    def _unpublished(self, response: Response) -> int:
        """Tokens that the owner showed in its last heartbeat and that never reached the log."""
        seat = self.scope.seat(response)
        if seat is None or seat.held.get(response.handle) != response.attempt:
            return 0
        return max(0, seat.lengths.get(response.handle, 0) - response.length)

    def _tell_orphans(self, changes: Sequence[ledger_pb2.Change]) -> None:
        by_worker: dict[tuple[str, Reason], list[int]] = {}
        for change in changes:
            response = self.scope.book.responses[change.orphan.handle]
            by_worker.setdefault((response.worker, change.orphan.reason), []).append(response.length)
        for (worker, reason), lengths in by_worker.items():
            name = ledger_pb2.OrphanReason.Name(reason).removeprefix("ORPHAN_REASON_").lower()
            self.scope.event(
                "warn" if name in ("dead", "missing", "stalled") else "info",
                "response.orphaned",
                f"{len(lengths)} responses with {sum(lengths)} tokens go on elsewhere: worker {worker} {_SAYS[name]}.",
                {"worker": worker, "reason": name, "responses": len(lengths), "tokens": sum(lengths)},
            )

    def beat(self, seat: Seat) -> None:
        """A worker of this job sent a heartbeat: compare what it holds with what the book says."""
        book = self.scope.book
        strangers: list[tuple[int, int]] = []
        undelivered: list[int] = []
        for handle, attempt in seat.held.items():
            response = book.responses.get(handle)
            if response is None or response.attempt != attempt:
                strangers.append((handle, attempt))
            elif response.state not in OWNED:
                self.courier.acknowledge(seat, response)
        if strangers and seat.job == self.scope.id:
            self.courier.abort_pairs(seat, strangers, flush=False)
        for response in book.index.owned_by(seat.id, seat.incarnation).values():
            if seat.held.get(response.handle) == response.attempt:
                self.courier.missing.pop(response.handle, None)
                continue
            sent = self.courier.sent.get(response.handle)
            if sent is None or sent[0] != response.attempt:
                if epoch_of(response.attempt) < self.scope.keeper.epoch:
                    # An earlier coordinator put it into the log and may not have lived to send it.
                    undelivered.append(response.handle)
                else:
                    # About to be sent: its worker shows it within two beats or not at all.
                    self.courier.sent[response.handle] = (response.attempt, self.scope.clock.monotonic(), seat.beats)
            elif (
                seat.beats > sent[2] + 1
                and self.scope.clock.monotonic() - sent[1] > self.scope.roster.timing.heartbeat_s
            ):
                self.courier.missing[response.handle] += 1
                self.scope.woken.set()
        # A worker that took an attempt before takes no notice of it, so sending it twice starts nothing twice.
        self.courier.send(undelivered)

    def conclude(self) -> list[ledger_pb2.Change]:
        """Return the changes that finish responses which their tokens have ended already."""
        changes = []
        going_on = {}
        for handle, response in chain(self.scope.book.index.within(State.PENDING).items(), self._served_pending()):
            if not response.length:
                continue
            if (
                self._going_on.get(handle) != response.serial
                and (finish := self._terminal(response)) is not Finish.NONE
            ):
                value = ledger_pb2.Conclude(handle=handle, finish=finish.value)  # type: ignore[arg-type]  # alias
                changes.append(ledger_pb2.Change(conclude=value))
            else:
                going_on[handle] = response.serial
        self._going_on = going_on
        return changes

    def _served_pending(self) -> Iterator[tuple[int, Response]]:
        """Yield the responses that are served and wait for a worker, with their handles."""
        for handle, response in self.scope.book.index.served.items():
            if response.state is State.PENDING and self.courier.known(response):
                yield handle, response

    def _terminal(self, response: Response) -> Finish:
        ids = response.ids.tolist()
        asked = self.courier.asked.get(response.group)
        stop = asked.sampling.stop if asked is not None else self.scope.spec.sampling.stop
        return terminal(
            ids,
            eos_ids=self.scope.prepared.tokenizer.eos_ids,
            budget=response.budget,
            stop=stop,
            text=self.scope.prepared.tokenizer.decode(ids) if stop else None,
        )

    def admit(self) -> list[ledger_pb2.Change]:
        """Return the changes that start new groups, as far as the staleness bound lets them."""
        book = self.scope.book
        room = self.scope.gate.room(counted=self.harvest.tally.alive + len(book.groups), step=self.scope.row.step)
        if not room or not self.scope.ready_seats():
            return []
        n = self.scope.spec.sampling.num_generations
        # A ledger that came back empty begins at 0: what had not reached SQL is started anew, under its old ordinals.
        new = (ordinal for ordinal in itertools.count(book.next_group) if ordinal not in self.harvest.tally)
        changes = []
        for ordinal in itertools.islice(new, room):
            row, data_epoch = self.scope.prepared.order.row(ordinal)
            admit = ledger_pb2.Admit(
                group=ordinal,
                first_handle=ordinal * n,
                n=n,
                budget=self.scope.spec.sampling.max_completion_length,
                prompt=row,
                data_epoch=data_epoch,
            )
            changes.append(ledger_pb2.Change(admit=admit))
        return changes

    def _oldest_steps(self) -> dict[int, int]:
        """Group -> oldest optimizer step whose version may sample it."""
        ranks = self.harvest.ranks()
        if self.scope.spec.staleness.order == "completion":
            return dict.fromkeys(ranks, max(0, self.scope.row.step - self.scope.spec.staleness.max_staleness))
        return {ordinal: self.scope.gate.oldest_step(rank) for ordinal, rank in ranks.items()}

    def assign(self, leaving: set[int]) -> list[ledger_pb2.Change]:
        """Return the changes that give waiting responses to workers; `leaving` are about to lose their owner."""
        book = self.scope.book
        pending = book.index.within(State.PENDING).values()
        served = [response for _, response in self._served_pending()]
        seats = self.scope.ready_seats()
        if not (pending or served) or not seats:
            return []
        held: Counter[str] = Counter()
        for (worker, _), responses in book.index.owners().items():
            held[worker] += len(responses)
        held.subtract(book.responses[handle].worker for handle in leaving)
        serving = Counter(
            response.worker
            for handle, response in book.index.served.items()
            if response.state in OWNED and handle not in leaving
        )
        alone = {
            response.worker
            for handle, response in book.index.blamed.items()
            if response.state in OWNED and handle not in leaving and blame.suspected(response.deaths)
        }
        most = self.scope.spec.rollout.max_inflight_per_worker
        candidates = [
            dispatch.Candidate(
                worker=seat.id,
                slots=min(seat.slots, most),
                held=held[seat.id],
                served=serving[seat.id],
                step=self.scope.versions[seat.version],
                version=seat.version,
                quarantined=seat.id in alone,
            )
            for seat in seats
            if seat.version is not None
        ]
        if all(candidate.held >= candidate.slots for candidate in candidates):
            return []
        newest = max(candidate.version for candidate in candidates)
        # Somebody waits for those that are served; they begin with the newest version that there is.
        waiting = [
            dispatch.Waiting(
                handle=response.handle,
                min_version=response.last_version if response.last_version is not None else newest,
                suspected=blame.suspected(response.deaths),
                served=True,
                prompt=response.group,
            )
            for response in sorted(served, key=lambda item: (-item.length, item.handle))
        ]
        oldest = self._oldest_steps() if pending else {}
        waiting += [
            dispatch.Waiting(
                handle=response.handle,
                min_step=oldest.get(response.group, 0),
                min_version=response.last_version or 0,
                suspected=blame.suspected(response.deaths),
                prompt=response.group,
            )
            # What was started goes first: its tokens are paid for and its group waits for it.
            for response in sorted(pending, key=lambda item: (item.group, -item.length, item.handle))
        ]
        incarnations = {seat.id: seat.incarnation for seat in seats}
        free = sum(max(0, candidate.slots - candidate.held) for candidate in candidates)
        return [
            ledger_pb2.Change(
                assign=ledger_pb2.Assign(
                    handle=handle,
                    attempt=attempt_of(self.scope.keeper.epoch, book.responses[handle].serial + 1),
                    worker=worker,
                    incarnation=incarnations[worker],
                )
            )
            # Of those that come later hardly any finds a slot: where their prompts are need not be known.
            for handle, worker in dispatch.assign(waiting, candidates, self._homes(waiting[:free]))
        ]

    def _homes(self, waiting: Iterable[dispatch.Waiting]) -> dict[int, set[str]]:
        """Return who has their prompts: who runs a sibling, or ended one with the version that it serves now."""
        homes: dict[int, set[str]] = {}
        for ordinal in {one.prompt for one in waiting if one.prompt is not None}:
            for response in self.scope.book.of(self.scope.book.group(ordinal)):
                seat = self.scope.seat(response)
                if seat is not None and (response.state in OWNED or response.last_version == seat.version):
                    homes.setdefault(ordinal, set()).add(seat.id)
        return homes

    def hand_back(self) -> list[ledger_pb2.Change]:
        """The job pauses, is paused, waits or is cancelled: workers publish what they have and let go."""
        now = self.scope.clock.monotonic()
        owned = list(self.scope.owned())
        if not owned:
            return []
        if self._aborted_at is None:
            self._aborted_at = now
            by_seat: dict[str, list[Response]] = {}
            for response in owned:
                if self.scope.seat(response) is not None:
                    by_seat.setdefault(response.worker, []).append(response)
            for worker, responses in by_seat.items():
                self.courier.abort(self.scope.roster.seats[worker], responses, flush=True)
        late = now - self._aborted_at > PAUSE_GRACE_S
        changes = []
        for response in owned:
            seat = self.scope.seat(response)
            released = seat is None or seat.member.state in ENDED or response.handle not in seat.held
            if late or (released and now - self._aborted_at > 2 * self.scope.roster.timing.heartbeat_s):
                changes.append(_orphan(response, ledger_pb2.ORPHAN_REASON_PAUSED))
        return changes


def _orphan(response: Response, reason: Reason, unpublished: int = 0) -> ledger_pb2.Change:
    orphan = ledger_pb2.Orphan(handle=response.handle, attempt=response.attempt, reason=reason, unpublished=unpublished)
    return ledger_pb2.Change(orphan=orphan)


_SAYS = {
    "dead": "sent no heartbeat",
    "drained": "handed them back",
    "missing": "does not hold them",
    "stalled": "made no progress",
    "refused": "refused them",
    "paused": "let go of them",
    "rejoined": "joined again",
    "migrated": "makes room",
}
