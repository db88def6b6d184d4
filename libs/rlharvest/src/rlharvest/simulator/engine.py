"""One replica of the model that decodes many responses at a time, at the level of its decode steps.

A step of b responses with C tokens of context in all makes b tokens and takes

    t(b, C) = overhead + max(weights / bandwidth, 2 P b / flops) + C kv / bandwidth

(reading the weights or multiplying by them, whichever is longer, then reading keys and values). Between two events b is
constant and C grows by b a step, so k steps take k t(b, C) + k^2 b kv / (2 bandwidth): time is advanced from event to event,
never token by token. A response that starts is prefilled first, which holds the others up; the prompt of a group is
prefilled once for all of its responses that are there together. When the cache is full the newest response goes back
to the queue and is prefilled again later, as vLLM does.

Invariants (property-tested): a response makes exactly its tokens however often it moves; keys and values never exceed the
cache; tokens made equal the progress of all responses; what starts is finished or still there.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass

_ROOM = 0.95
"""Share of the cache up to which responses start; the rest is for those that run to grow into."""


@dataclass(slots=True)
class Response:
    """A response while it is live."""

    handle: int
    group: int
    prompt: int
    """Tokens of its prompt."""
    target: int
    """Tokens that it will have; no policy looks at this, but for the oracle."""
    length: int = 0
    """Tokens that are safe: what its owner made since is counted when it leaves it."""
    worker: str = ""
    moved: int = 0
    """Times that it was taken from an owner that was still there."""
    started: int = 0
    """Times that it was prefilled."""
    version: int = 0
    """Of its newest token."""
    remote: bool = False
    """Its newest owner was a preemptible worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What one replica of one model can do."""

    overhead_s: float
    """Of a step, whatever is in it."""
    weights_s: float
    """Reading the weights once."""
    flop_s: float
    """Multiplying the weights by one token."""
    context_s: float
    """Reading the keys and values of one token of context."""
    prefill_s: float
    """Prefilling one token."""
    cache: int
    """Tokens whose keys and values it holds."""
    slots: int
    """Responses that decode at a time."""

    def step_s(self, batch: float, context: float) -> float:
        """Return the seconds of a step of `batch` responses with `context` tokens each."""
        return self.overhead_s + max(self.weights_s, self.flop_s * batch) + self.context_s * batch * context

    def rate(self, batch: float, context: float) -> float:
        """Return its tokens/s."""
        return batch / self.step_s(batch, context)

    def batch(self, context: float) -> int:
        """Return how many responses of so many tokens it decodes at a time."""
        return max(1, min(self.slots, int(_ROOM * self.cache / max(1.0, context))))


@dataclass(slots=True)
class _Running:
    response: Response
    base: float
    """Progress of the engine when the response had the tokens `length`."""
    finish: float
    """Progress at which it is done."""


class Engine:
    """The responses of one replica."""

    def __init__(self, name: str, kind: str, speed: Speed, *, preemptible: bool) -> None:
        self.name = name
        self.kind = kind
        self.speed = speed
        self.preemptible = preemptible
        self.at = 0.0
        """Time up to which everything is accounted for."""
        self.context = 0.0
        """Tokens in the cache."""
        self.tokens = 0.0
        """Made so far."""
        self.prefilled = 0
        """Tokens prefilled so far."""
        self.decoding_s = 0.0
        """Time spent on steps so far."""
        self.steps = 0.0
        """Steps so far, also the progress of each response that runs."""
        self.queue: deque[Response] = deque()
        self.running: dict[int, _Running] = {}
        self._stall_s = 0.0
        self._finishes: list[tuple[float, int]] = []
        self._groups: Counter[int] = Counter()

    @property
    def held(self) -> int:
        """Responses that it has."""
        return len(self.running) + len(self.queue)

    @property
    def full(self) -> bool:
        """Whether another response would have to wait."""
        return bool(self.queue) or len(self.running) >= self.speed.slots or self.context > _ROOM * self.speed.cache

    @property
    def mean_context(self) -> float:
        """Tokens in the cache of a running response."""
        return self.context / len(self.running) if self.running else 0.0

    def advance(self, now: float) -> None:
        """Account for the time until now. Nothing may finish or overflow before; `next_event` says when that is."""
        seconds = now - self.at
        self.at = now
        if self._stall_s > 0:
            stalled = min(self._stall_s, seconds)
            self._stall_s -= stalled
            seconds -= stalled
        batch = len(self.running)
        if not batch or seconds <= 0:
            return
        linear, square = self._law()
        steps = (math.sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square)
        self.steps += steps
        self.context += batch * steps
        self.tokens += batch * steps
        self.decoding_s += seconds

    def next_event(self) -> float | None:
        """Return when the next response finishes or the cache is full; None: never as things are."""
        while self._finishes and not self._valid(self._finishes[0]):
            heapq.heappop(self._finishes)
        batch = len(self.running)
        if not batch:
            return None
        steps = self._finishes[0][0] - self.steps
        if batch > 1:
            steps = min(steps, (self.speed.cache - self.context) / batch)
        steps = max(0.0, steps)
        linear, square = self._law()
        return self.at + self._stall_s + steps * (linear + square * steps)

    def put(self, response: Response) -> None:
        """Give it a response. It must be advanced to now."""
        self.queue.append(response)
        self._start()

    def stall(self, seconds: float) -> None:
        """Let it decode nothing for so long, e.g. while weights are swapped. It must be advanced to now."""
        self._stall_s += seconds

    def collect(self) -> list[Response]:
        """Return what is finished, and make room; then start what waits. It must be advanced to now."""
        done = []
        # A step is either done or not: what is a rounding error away is done.
        while self._finishes and (
            not self._valid(self._finishes[0]) or self._finishes[0][0] <= self.steps + 1e-6 + 1e-12 * self.steps
        ):
            finish, handle = heapq.heappop(self._finishes)
            running = self.running.get(handle)
            if running is None or running.finish != finish:
                continue
            response = self._leave(handle)
            response.length = response.target
            done.append(response)
        if self.context >= self.speed.cache * (1 - 1e-9):
            self._make_room()
        self._start()
        return done

    def take(self, handle: int, *, keep: bool = True, lost: int = 0) -> Response:
        """Take one response away, with the tokens it has. It must be advanced to now.

        Args:
            keep: False: without the tokens that this engine made. lost: how many of the newest tokens are not safe.
        """
        for response in self.queue:
            if response.handle == handle:
                self.queue.remove(response)
                return response
        made = self.made(handle)
        response = self._leave(handle)
        if keep:
            response.length = min(response.target - 1, response.length + max(0, made - lost))
        return response

    def made(self, handle: int) -> int:
        """Return how many tokens this engine made of a running response."""
        running = self.running[handle]
        return max(0, int(self.steps - running.base + 1e-6))

    def clear(self, *, keep: bool = True, lost: int = 0) -> list[Response]:
        """Take everything away."""
        taken = [self.take(handle, keep=keep, lost=lost) for handle in list(self.running)]
        taken += self.queue
        self.queue.clear()
        self._stall_s = 0.0
        return taken

    def _law(self) -> tuple[float, float]:
        """Return (linear, square): k steps take linear * k + square * k^2 seconds."""
        speed, batch = self.speed, len(self.running)
        linear = speed.overhead_s + max(speed.weights_s, speed.flop_s * batch) + speed.context_s * self.context
        return linear, speed.context_s * batch / 2

    def _valid(self, entry: tuple[float, int]) -> bool:
        running = self.running.get(entry[1])
        return running is not None and running.finish == entry[0]

    def _start(self) -> None:
        while self.queue and len(self.running) < self.speed.slots:
            response = self.queue[0]
            size = response.prompt + response.length
            if self.running and self.context + size > _ROOM * self.speed.cache:
                return
            self.queue.popleft()
            shared = self._groups[response.group] > 0
            fresh = response.length if shared else size
            self._stall_s += fresh * self.speed.prefill_s
            self.prefilled += fresh
            self._groups[response.group] += 1
            self.context += size
            response.started += 1
            finish = self.steps + response.target - response.length
            self.running[response.handle] = _Running(response, self.steps, finish)
            heapq.heappush(self._finishes, (finish, response.handle))

    def _leave(self, handle: int) -> Response:
        running = self.running.pop(handle)
        response = running.response
        self.context -= response.prompt + response.length + self.steps - running.base
        if not self.running:
            self.context = 0.0
        self._groups[response.group] -= 1
        if not self._groups[response.group]:
            del self._groups[response.group]
        return response

    def _make_room(self) -> None:
        """Send the newest responses back to the queue until there is room to grow."""
        while len(self.running) > 1 and self.context > _ROOM * self.speed.cache:
            newest = next(reversed(self.running))
            made = self.made(newest)
            response = self._leave(newest)
            response.length = min(response.target - 1, response.length + made)
            self.queue.appendleft(response)
