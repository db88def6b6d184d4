"""Starts a service with faults at named points: `python -m rlharvest.testing.faults PROGRAM serve`.

The services themselves hold no code for tests. This entry point imports a service, wraps the functions that the traps
name, and then runs the service's own console script. RLHARVEST_TESTING_FAULTS holds one trap a line::

    kill before rlharvest_rollout.publisher:Publisher._publish@3
    kill after rlharvest_rollout.publisher:Publisher._deliver > nats.aio.transport:TcpTransport.drain
    skip before rlharvest_rollout.worker:Worker._on_assign
    set rlharvest_coordinator.courier:INLINE_BYTES 40

`kill` and `stop` send SIGKILL and SIGSTOP to the process itself; `skip` leaves one call out, which then returns None;
`set` replaces a number of a module. `@3` is the third pass. `a > b` is the first pass of b that begins after a was
entered. RLHARVEST_TESTING_CLOCK names a file with the seconds by which this process's clocks are off (`set_clock`).
RLHARVEST_TESTING_HOST names a host that has the address 127.0.0.1 for as long as there is a file of that path.

Invariants: a trap springs once; where none springs, the service runs as without this module; a trap that names nothing
is an error at the start.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rlharvest.clock import SystemClock
from rlharvest.errors import InvalidField
from rlharvest.startup import leave_on_signals
from rlharvest.testing.system import Service, System

FAULTS = "RLHARVEST_TESTING_FAULTS"
CLOCK = "RLHARVEST_TESTING_CLOCK"
HOST = "RLHARVEST_TESTING_HOST"

Action = Literal["kill", "stop", "skip"]
When = Literal["before", "after"]

_NAME = re.compile(r"[\w.]+:[\w.]+")


@dataclass(frozen=True, slots=True)
class Point:
    """A function, and which of its passes."""

    name: str
    """module:qualified name."""
    nth: int = 1

    def __str__(self) -> str:
        return self.name if self.nth == 1 else f"{self.name}@{self.nth}"


@dataclass(frozen=True, slots=True)
class Trap:
    """What happens at which point."""

    action: Action
    when: When
    points: tuple[Point, ...]
    """Entered one after another; the last is where it happens."""

    def __str__(self) -> str:
        return f"{self.action} {self.when} {' > '.join(map(str, self.points))}"


class Trigger:
    """Counts the passes of a trap's points; a pure state machine."""

    def __init__(self, trap: Trap) -> None:
        self.trap = trap
        self._stage = 0
        self._passes = 0

    def passed(self, name: str, when: When) -> bool:
        """A function was entered or left; return whether the trap springs now."""
        points = self.trap.points
        if self._stage == len(points) or name != points[self._stage].name:
            return False
        last = self._stage == len(points) - 1
        if when != (self.trap.when if last else "before"):
            return False
        self._passes += 1
        if self._passes < points[self._stage].nth:
            return False
        self._stage, self._passes = self._stage + 1, 0
        return last


def parse_trap(text: str) -> Trap:
    """Return the trap of a line.

    Raises:
        InvalidField: it is none; says what was expected.
    """
    words = text.split(maxsplit=2)
    if len(words) == 3 and words[0] in get_args(Action) and words[1] in get_args(When):
        points = []
        for part in words[2].split(">"):
            name, _, nth = part.strip().partition("@")
            if not _NAME.fullmatch(name) or not (nth or "1").isdigit() or int(nth or 1) < 1:
                break
            points.append(Point(name, int(nth or 1)))
        else:
            if words[0] != "skip" or words[1] == "before":
                return Trap(words[0], words[1], tuple(points))  # type: ignore[arg-type]  # checked against the literals
    raise InvalidField(
        FAULTS, text, "not a trap", "Write: kill|stop|skip before|after module:name[@n] [> module:name]."
    )


def install(text: str) -> None:
    """Set the traps of a text, one a line.

    Raises:
        InvalidField: a line is not a trap.
        AttributeError, ImportError: it names nothing.
    """
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("set "):
            _, name, value = line.split()
            module, _, attribute = name.partition(":")
            owner = importlib.import_module(module)
            setattr(owner, attribute, type(getattr(owner, attribute))(value))
            continue
        trap = parse_trap(line)
        trigger = Trigger(trap)
        for name in {point.name for point in trap.points}:
            _wrap(name, trigger)


def _wrap(name: str, trigger: Trigger) -> None:
    module, _, path = name.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, attribute = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    call = getattr(owner, attribute)
    setattr(owner, attribute, _wrapped(call, name, trigger))


def _wrapped(call: Callable[..., Any], name: str, trigger: Trigger) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(call):

        @functools.wraps(call)
        async def waiting(*args: Any, **kwargs: Any) -> Any:
            if trigger.passed(name, "before") and _spring(trigger.trap):
                return None
            value = await call(*args, **kwargs)
            if trigger.passed(name, "after"):
                _spring(trigger.trap)
            return value

        return waiting

    @functools.wraps(call)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if trigger.passed(name, "before") and _spring(trigger.trap):
            return None
        value = call(*args, **kwargs)
        if trigger.passed(name, "after"):
            _spring(trigger.trap)
        return value

    return plain


def _spring(trap: Trap) -> bool:
    """Do it; return whether the call is left out."""
    print(f"trap: {trap}", file=sys.stderr, flush=True)
    if trap.action != "skip":
        os.kill(os.getpid(), signal.SIGKILL if trap.action == "kill" else signal.SIGSTOP)
    return trap.action == "skip"


# --- clocks -----------------------------------------------------------------------------------------------------------


def set_clock(path: Path, *, wall_s: float, monotonic_s: float) -> None:
    """Set the clocks of the processes that were started with this file off by so many seconds.

    Args:
        wall_s: of time.time.
        monotonic_s: of rlharvest's own clock, the one deadlines are kept by; must never fall.
    """
    draft = path.with_suffix(".new")
    draft.write_text(f"{wall_s} {monotonic_s}", encoding="ascii")
    draft.replace(path)


def _shift_clocks(path: Path) -> None:
    wall, monotonic = time.time, SystemClock.monotonic
    read: tuple[int, float, float] = (0, 0.0, 0.0)

    def offsets() -> tuple[int, float, float]:
        nonlocal read
        changed = path.stat().st_mtime_ns if path.exists() else 0
        if changed != read[0]:
            values = path.read_text(encoding="ascii").split()
            read = (changed, float(values[0]), float(values[1]))
        return read

    def shifted() -> float:
        # For our own code only: gRPC makes deadlines of this clock and gives them to a library that asks the real one.
        ours = sys._getframe(1).f_globals.get("__name__", "").startswith("rlharvest")
        return wall() + offsets()[1] if ours else wall()

    time.time = shifted
    SystemClock.monotonic = lambda self: monotonic(self) + offsets()[2]  # type: ignore[method-assign]  # that is the fault


# --- names ------------------------------------------------------------------------------------------------------------


def _name_this_machine(path: Path) -> None:
    resolve = socket.getaddrinfo

    def found(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host != path.name:
            return resolve(host, *args, **kwargs)
        if not path.exists():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1", *args, **kwargs)

    socket.getaddrinfo = found


# --- starting ---------------------------------------------------------------------------------------------------------


def with_faults(service: Service) -> Service:
    """Let a service start under this module from now on; traps are given with each start."""
    service.command = [sys.executable, "-m", "rlharvest.testing.faults", service.program]
    return service


def wait_sprung(system: System, service: Service, trap: str, *, timeout_s: float = 180.0) -> None:
    """Wait until a service is dead, of this trap.

    Raises:
        AssertionError: it lives, or something else ended it.
    """
    system.until(lambda: not service.running, timeout_s=timeout_s, what=f"the trap to spring: {trap}")
    assert service.process is not None
    assert service.process.returncode == -signal.SIGKILL, f"{trap}\n{service.tail()}"


def main() -> None:
    """Set the traps, then be the program."""
    leave_on_signals()
    program, *arguments = sys.argv[1:]
    install(os.environ.get(FAULTS, ""))
    if clock := os.environ.get(CLOCK):
        _shift_clocks(Path(clock))
    if host := os.environ.get(HOST):
        _name_this_machine(Path(host))
    (script,) = importlib.metadata.entry_points(group="console_scripts", name=program)
    sys.argv = [program, *arguments]
    script.load()()


if __name__ == "__main__":
    main()
