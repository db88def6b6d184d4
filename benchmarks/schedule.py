"""What goes wrong when, in a run of benchmarks.chaos: a pure function of a seed.

Invariants: the same arguments give the same schedule; times rise; a target is not hit again before it has recovered from
its last fault; at least SPARED workers are left alone at any time; of twenty faults in a row four are kills.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

Kind = Literal["kill", "empty", "restart", "stop", "black_hole", "slow_disk", "slow_link", "clock", "duplicate", "late"]

KILLS: frozenset[Kind] = frozenset({"kill", "empty"})
"""SIGKILLs; `empty` is one of NATS whose files are deleted before it starts again."""

FAULTS_A_MINUTE = 20
SPARED = 3
RECOVERY_S = 4.0
"""After the end of a fault its target is left alone for this long."""

BUS = "bus"

_DECK: dict[Kind, int] = {
    "kill": 4,
    "restart": 1,
    "stop": 4,
    "black_hole": 3,
    "slow_disk": 2,
    "slow_link": 1,
    "clock": 2,
    "duplicate": 2,
    "late": 1,
}
"""Of twenty faults."""

_WORKER = "rollout"
"""Stands for one of the workers."""

_TARGETS: dict[Kind, tuple[str, ...]] = {
    "kill": (*[_WORKER] * 9, "coordinator", "coordinator", "trainer", "reward", "weights", "nats", "valkey"),
    "empty": ("nats",),
    "restart": (*[_WORKER] * 4, "coordinator", "reward", "weights", "nats", "valkey"),
    "stop": (*[_WORKER] * 6, "coordinator", "coordinator", "trainer", "reward", "weights", "nats", "nats", "valkey"),
    "black_hole": (*[_WORKER] * 5, "coordinator>nats", "coordinator>valkey"),
    "slow_disk": ("nats", "valkey"),
    "slow_link": (*[_WORKER] * 3, "coordinator>nats"),
    "clock": (*[_WORKER] * 2, "coordinator", "coordinator", "trainer", "reward"),
    "duplicate": (BUS,),
    "late": (BUS,),
}

_SECONDS: dict[Kind, tuple[float, float]] = {
    "kill": (0.0, 3.0),
    "empty": (0.0, 1.0),
    "restart": (0.0, 0.5),
    "stop": (0.3, 6.0),
    "black_hole": (1.0, 12.0),
    "slow_disk": (2.0, 4.0),
    "slow_link": (3.0, 8.0),
    "clock": (0.0, 0.0),
    "duplicate": (0.0, 0.0),
    "late": (0.0, 0.0),
}
"""How long it lasts, from least to most."""

_AMOUNTS: dict[Kind, tuple[float, float]] = {
    "slow_disk": (0.5, 0.9),
    "slow_link": (0.02, 0.3),
    "clock": (-3600.0, 3600.0),
    "duplicate": (5.0, 60.0),
    "late": (5.0, 60.0),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    at: float
    """Seconds from the start of the run."""
    kind: Kind
    target: str
    """A service, a link `client>server`, or the bus."""
    seconds: float
    """How long it lasts; for a kill, until the process is started again."""
    amount: float
    """slow_disk: share of the time that the server stands still. slow_link: seconds a block waits. clock: seconds that
    the wall clock jumps. duplicate, late: messages."""

    @property
    def is_kill(self) -> bool:
        return self.kind in KILLS

    def __str__(self) -> str:
        amount = f" {self.amount:g}" if self.amount else ""
        return f"{self.kind} {self.target} for {self.seconds:g} s{amount}"


def schedule(seed: int, *, minutes: float, workers: int) -> tuple[Fault, ...]:
    """Return the faults of a run.

    Args:
        workers: more than SPARED.
    """
    source = random.Random(f"chaos {seed} {minutes:g} {workers}")
    n = max(1, round(minutes * FAULTS_A_MINUTE))
    kinds: list[Kind] = []
    while len(kinds) < n:
        deck = [kind for kind, times in _DECK.items() for _ in range(times)]
        source.shuffle(deck)
        kinds += deck
    kinds = kinds[:n]
    # Half-way: enough has been said by then that the new stream has to be filled from workers, store and SQL.
    middle = next((index for index in range(n // 2, n) if kinds[index] == "kill"), None)
    if middle is not None:
        kinds[middle] = "empty"
    gap = 60.0 * minutes / n
    at = 0.0
    busy: dict[str, float] = {}
    faults = []
    for kind in kinds:
        at = round(at + gap * source.uniform(0.4, 1.6), 2)
        target = _target(kind, at, busy, workers, source)
        while target is None:
            at = round(min(until for until in busy.values() if until > at) + 0.01, 2)
            target = _target(kind, at, busy, workers, source)
        seconds = round(_SECONDS[kind][0] + (_SECONDS[kind][1] - _SECONDS[kind][0]) * source.random() ** 2, 2)
        amount = round(source.uniform(*_AMOUNTS[kind]), 2) if kind in _AMOUNTS else 0.0
        faults.append(Fault(at, kind, target, seconds, float(int(amount)) if target == BUS else amount))
        if target != BUS:
            busy[process(target)] = at + seconds + RECOVERY_S
    return tuple(faults)


def process(target: str) -> str:
    """Return the process that a target belongs to: the client, for a link."""
    return target.partition(">")[0]


def _target(kind: Kind, at: float, busy: dict[str, float], workers: int, source: random.Random) -> str | None:
    """Draw a target that is not busy; one that is gives its turn to a worker, where that can be."""
    wanted = source.choice(_TARGETS[kind])
    if wanted == BUS or (wanted != _WORKER and busy.get(process(wanted), 0.0) <= at):
        return wanted
    if _WORKER not in _TARGETS[kind]:
        others = [other for other in _TARGETS[kind] if busy.get(process(other), 0.0) <= at]
        return source.choice(others) if others else None
    names = [f"{_WORKER}-{index}" for index in range(workers)]
    free = [name for name in names if busy.get(name, 0.0) <= at]
    return source.choice(free) if len(free) > SPARED else None


def dump(faults: Sequence[Fault]) -> str:
    """Return a schedule as JSON lines."""
    return "".join(json.dumps(asdict(fault)) + "\n" for fault in faults)


def load(text: str) -> tuple[Fault, ...]:
    """Return the schedule of JSON lines; raises ValueError for what is none."""
    faults = tuple(Fault(**json.loads(line)) for line in text.splitlines() if line.strip())
    for fault in faults:
        if fault.kind not in get_args(Kind):
            raise ValueError(f"{fault.kind!r} is not a kind of fault; known: {', '.join(get_args(Kind))}")
    return faults
