"""Who generates what: admission, dispatch and balance of the simulated coordinator.

It asks the same policies as the live one, in the same way: groups are admitted by the staleness gate, what waits is put in
order of its group and then of its length, workers are offered as candidates with what they hold, and a worker that died
gives its responses back after the heartbeat's deadline, short of what it had not published.

Invariants (property-tested): a response has one owner at a time; none waits while a worker that may take it has a free slot
for longer than a round; no token that was safe is generated again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator

from rlharvest.policies import balance, dispatch
from rlharvest.policies.staleness import Gate
from rlharvest.policies.throughput import Throughput
from rlharvest.simulator import rlboost
from rlharvest.simulator.clock import Clock, Timer
from rlharvest.simulator.engine import Response
from rlharvest.simulator.group import Counts, Group
from rlharvest.simulator.scenario import Scenario
from rlharvest.simulator.seat import Seat
from rlharvest.simulator.strategy import Strategy
from rlharvest.simulator.workload import Lengths

HANDOVER_S = 0.2
"""From a decision to move a response until its new owner has it: flush, orphan, assign."""

THETA = 4
"""Responses that may wait in a worker before it is offered no more."""

UNBOUNDED = 1 << 30
OBSERVED_A_LOOK = 32
"""Workers of which a look at the balance measures the steps."""


class Rollout:
    """All responses of the run, and the workers that generate them."""

    def __init__(
        self,
        clock: Clock,
        scenario: Scenario,
        strategy: Strategy,
        *,
        on_group: Callable[[Group], None],
        on_busy: Callable[[Seat], None],
    ) -> None:
        self.clock = clock
        self.scenario = scenario
        self.strategy = strategy
        self.seats: dict[str, Seat] = {}
        self.live: dict[int, Response] = {}
        self.groups: dict[int, Group] = {}
        self.counts = Counts()
        self.last_remote_s = 0.0
        """When a preemptible worker finished a response last."""
        self.last_finish_s = 0.0
        self.joining = 0
        """Workers that are about to be ready."""
        self.tables: dict[str, Throughput] = {}
        self._on_group, self._on_busy = on_group, on_busy
        spec = scenario.workload
        self._n = spec.num_generations
        self._lengths = Lengths(spec, scenario.seed)
        self._gate = Gate(spec.prompts_per_step, scenario.max_staleness, scenario.steps)
        self._admitted = 0
        self._pending: list[tuple[int, int, int]] = []
        self._round = Timer(clock, self._do_round)
        self._round_set = False
        self._next_round_s = 0.0
        self._look = Timer(clock, self._do_look)
        self._looking = False
        self._touched: set[str] = set()
        self._balancer = balance.Balancer(self._step_s)
        self._mean_tokens = spec.median_tokens

    # --- what others ask and tell -----------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Responses without an owner."""
        return len(self._pending)

    @property
    def mean_tokens(self) -> float:
        """Length of responses so far, mean, newest steps first."""
        return self._mean_tokens

    def admit(self, step: int) -> None:
        """Start what the gate lets start, `step` optimizer steps being done."""
        spec = self.scenario.workload
        for _ in range(self._gate.room(counted=self._admitted, step=step)):
            ordinal = self._admitted
            self._admitted += 1
            self.groups[ordinal] = Group(ordinal, self._n, self._n * spec.prompt_tokens)
            for number, target in enumerate(self._lengths.draw(ordinal)):
                handle = ordinal * self._n + number
                response = Response(handle=handle, group=ordinal, prompt=spec.prompt_tokens, target=target)
                self.live[handle] = response
                heapq.heappush(self._pending, (ordinal, 0, handle))
        self.wake()

    def wake(self) -> None:
        """Something happened that a round should look at."""
        if not self._round_set:
            self._round_set = True
            self._round.at(max(self.clock.now, self._next_round_s))
        if not self._looking and self.strategy.balance != "none":
            self._looking = True
            self._look.at(self.clock.now + self.scenario.coordinator.balance_s)

    def sit(self, seat: Seat) -> None:
        """A worker is there."""
        self.seats[seat.name] = seat

    def stand_up(self, seat: Seat, *, noticed: bool) -> None:
        """A worker leaves: at once and with all its tokens if noticed, otherwise as its death is found out."""
        seat.ready = False
        seat.timer.cancel()
        seat.engine.advance(self.clock.now)
        keep = noticed or self.strategy.keep_tokens
        lost = 0 if noticed else self.scenario.coordinator.flush_tokens
        running = list(seat.engine.running)
        had = sum(self._length(self.live[handle]) for handle in running)
        taken = [*seat.engine.clear(keep=keep, lost=lost), *seat.incoming.values()]
        self.counts.regenerated += had - sum(self.live[handle].length for handle in running)
        if not keep:
            self.counts.regenerated += sum(response.length for response in taken)
            for response in taken:
                response.length = 0
        seat.incoming.clear()
        self._balancer.remove(seat.name)
        self._touched.discard(seat.name)
        if not seat.reserved:
            seat.gone = True
            del self.seats[seat.name]
        self._on_busy(seat)
        if not taken:
            return
        if noticed:
            self._orphan(taken)
        else:
            self.counts.orphans += len(taken)
            self.clock.after(self.scenario.coordinator.detect_s, lambda: self._orphan(taken))

    def settle(self, seat: Seat) -> None:
        """Account for what a worker did until now, and set when to look again."""
        engine = seat.engine
        engine.advance(self.clock.now)
        for response in engine.collect():
            self._finish(seat, response)
        self._touched.add(seat.name)
        following = engine.next_event()
        if following is None:
            seat.timer.cancel()
        else:
            seat.timer.at(following)
        self._on_busy(seat)

    def remaining_tokens(self, batch: int) -> float:
        """Return about how many tokens the responses of a batch still have to generate, by what was seen so far."""
        size = self.scenario.workload.prompts_per_step * self._n
        total = 0.0
        most = self.scenario.workload.max_tokens
        for handle in range(batch * size, (batch + 1) * size):
            response = self.live.get(handle)
            if response is not None:
                length = self._length(response)
                total += min(most - length, max(self._mean_tokens - length, 0.25 * self._mean_tokens))
        return total

    # --- rounds -----------------------------------------------------------------------------------------------------------

    def _do_round(self) -> None:
        self._round_set = False
        quota = self.strategy.groups_per_poll
        self._next_round_s = self.clock.now + (1.0 if quota is not None else self.scenario.coordinator.round_s)
        if not self._pending:
            return
        self.counts.rounds += 1
        oldest = self._gate.oldest_step(self._pending[0][0])
        candidates = [
            dispatch.Candidate(
                worker=seat.name, slots=self._offered(seat), held=seat.held, step=seat.version, version=seat.version
            )
            for seat in self.seats.values()
            if seat.ready and seat.version is not None and seat.version >= oldest
        ]
        free: Counter[int] = Counter()
        for candidate in candidates:
            free[candidate.step] += max(0, candidate.slots - candidate.held)
        if not free.total():
            return
        popped: list[tuple[int, int, int]] = []
        given: set[int] = set()
        by_seat: dict[str, list[Response]] = {}
        waiting = list(self._waiting(free, popped, quota))
        homes = {one.prompt: self.groups[one.prompt].homes for one in waiting if one.prompt is not None}
        for handle, worker in dispatch.assign(waiting, candidates, homes):
            given.add(handle)
            by_seat.setdefault(worker, []).append(self.live[handle])
        for entry in popped:
            if entry[2] not in given:
                heapq.heappush(self._pending, entry)
        for worker, responses in by_seat.items():
            seat = self.seats[worker]
            seat.engine.advance(self.clock.now)
            for response in responses:
                self._give(seat, response)
            self.settle(seat)
        if quota is not None and self._pending:
            self.wake()

    def _waiting(
        self, free: Counter[int], popped: list[tuple[int, int, int]], quota: int | None
    ) -> Iterator[dispatch.Waiting]:
        """Yield what waits, in order, as far as there can be a slot for it."""
        most = free.total() if quota is None else min(free.total(), quota * self._n)
        while self._pending and len(popped) < most:
            entry = self._pending[0]
            response = self.live[entry[2]]
            oldest = self._gate.oldest_step(response.group)
            fitting = sum(n for step, n in free.items() if step >= max(oldest, response.version))
            if fitting <= len(popped):
                return
            popped.append(heapq.heappop(self._pending))
            prompt = response.group if self.strategy.balance == "rlharvest" else None
            yield dispatch.Waiting(handle=response.handle, min_step=oldest, min_version=response.version, prompt=prompt)

    def _offered(self, seat: Seat) -> int:
        """Return how many responses a worker is offered."""
        if self.strategy.static:
            return UNBOUNDED
        waiting = len(seat.engine.queue)
        if waiting >= (1 if self.strategy.balance == "rlboost" else THETA):
            return seat.held
        slots = seat.engine.speed.slots
        if self.strategy.balance != "rlharvest" or not self.joining:
            return slots
        table = self.tables.get(seat.engine.kind)
        plateau = None if table is None else table.plateau(seat.engine.mean_context)
        return balance.bound(slots=slots, plateau=plateau, theta=THETA, joining=True)

    def _give(self, seat: Seat, response: Response) -> None:
        response.worker = seat.name
        response.remote = not seat.reserved
        response.version = seat.version or 0
        self.groups[response.group].homes.add(seat.name)
        seat.engine.put(response)

    def _orphan(self, responses: list[Response]) -> None:
        for response in responses:
            response.worker = ""
            heapq.heappush(self._pending, (response.group, -response.length, response.handle))
        self.wake()

    def _finish(self, seat: Seat, response: Response) -> None:
        del self.live[response.handle]
        self.counts.generated += response.target
        self.counts.finished += 1
        self._mean_tokens += (response.target - self._mean_tokens) / min(1000, self.counts.finished)
        self.last_finish_s = self.clock.now
        if not seat.reserved:
            self.last_remote_s = self.clock.now
        group = self.groups[response.group]
        group.left -= 1
        group.tokens += response.target
        if self._pending:
            self.wake()
        if not group.left:
            del self.groups[response.group]
            self._on_group(group)

    # --- balance ----------------------------------------------------------------------------------------------------------

    def _do_look(self) -> None:
        self._looking = False
        if not self.live:
            return
        self._looking = True
        self._look.at(self.clock.now + self.scenario.coordinator.balance_s)
        self._observe()
        if self.strategy.balance == "rlboost":
            loads = [self._load(seat) for seat in self.seats.values() if seat.ready]
            moves = rlboost.moves(loads, {kind: self._plateau(kind, loads) for kind in self.tables})
        else:
            for name in self._touched:
                seat = self.seats.get(name)
                if seat is not None and seat.ready:
                    self._balancer.update(self._load(seat))
            moves = self._balancer.moves(remaining=self._remaining())
        self._touched.clear()
        for move in moves:
            self._move(move)

    def _observe(self) -> None:
        """Measure the steps of some workers, and learn from them."""
        for name in sorted(self._touched)[:OBSERVED_A_LOOK]:
            seat = self.seats.get(name)
            if seat is None or not seat.ready:
                continue
            engine = seat.engine
            engine.advance(self.clock.now)
            steps, tokens = engine.steps - seat.steps, engine.tokens - seat.tokens
            seconds = engine.decoding_s - seat.decoding_s
            seat.steps, seat.tokens, seat.decoding_s = engine.steps, engine.tokens, engine.decoding_s
            if steps >= 1 and engine.running:
                table = self.tables.setdefault(engine.kind, Throughput())
                table.observe(max(1, round(tokens / steps)), engine.mean_context, seconds / steps)

    def _load(self, seat: Seat) -> balance.Load:
        engine = seat.engine
        engine.advance(self.clock.now)
        return balance.Load(
            worker=seat.name,
            kind=engine.kind,
            running=len(engine.running) + len(seat.incoming),
            pending=len(engine.queue),
            slots=engine.speed.slots,
            context=engine.mean_context,
            version=seat.version or 0,
            full=engine.full,
        )

    def _plateau(self, kind: str, loads: list[balance.Load]) -> int | None:
        contexts = [load.context for load in loads if load.kind == kind and load.running]
        return self.tables[kind].plateau(sum(contexts) / len(contexts)) if contexts else None

    def _remaining(self) -> float:
        """Return about how much a running response still has to generate: as lengths are lognormal, as much as it has."""
        running = [seat.engine.mean_context for seat in self.seats.values() if seat.engine.running]
        length = max(0.0, sum(running) / len(running) - self.scenario.workload.prompt_tokens) if running else 0.0
        return min(self.scenario.workload.max_tokens - length, max(self._mean_tokens / 2, length))

    def _step_s(self, kind: str, batch: float, context: float) -> float:
        table = self.tables.get(kind)
        return table.step_s(batch, context) if table is not None and table.known else 0.0

    def _move(self, move: balance.Move) -> None:
        """Let a worker hand responses over to another."""
        source, target = self.seats.get(move.source), self.seats.get(move.target)
        if source is None or target is None or not target.ready:
            return
        engine = source.engine
        engine.advance(self.clock.now)
        if move.running:
            running = [
                balance.Running(
                    handle=handle, length=item.response.length + engine.made(handle), moved=item.response.moved
                )
                for handle, item in engine.running.items()
            ]
            handles = balance.choose(running, move.n)
        else:
            # The newest have waited least.
            handles = [response.handle for response in list(engine.queue)[-move.n :]]
        for handle in handles:
            response = engine.take(handle)
            response.moved += move.running
            target.incoming[handle] = response
            response.worker = target.name
        self.counts.moves += len(handles)
        self.settle(source)
        self.clock.after(HANDOVER_S, lambda: self._arrive(target, handles))

    def _arrive(self, target: Seat, handles: list[int]) -> None:
        arrived = [target.incoming.pop(handle) for handle in handles if handle in target.incoming]
        if not arrived:
            return
        target.engine.advance(self.clock.now)
        for response in arrived:
            self._give(target, response)
        self.settle(target)

    def _length(self, response: Response) -> int:
        """Return the tokens of a response, those that its owner made included."""
        seat = self.seats.get(response.worker)
        if seat is None or response.handle not in seat.engine.running:
            return response.length
        return response.length + seat.engine.made(response.handle)
