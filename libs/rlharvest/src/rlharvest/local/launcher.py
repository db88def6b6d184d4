"""Start programs in order, keep them running, change the number of rollout workers, stop all in order.

Invariants: a stage starts when the one before is ready; the first that fails stops everything and shows the end of its
log; a child that ends is started again after a pause (restarts.py) until it does so too often; stopping goes by role,
in the order given, each with its own time limit; when `run` returns no child is left, whatever happened.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from rlharvest.errors import InfrastructureError, InvalidField
from rlharvest.local import stale
from rlharvest.local.child import Child
from rlharvest.local.control import ControlServer
from rlharvest.local.datadir import DataDirectory
from rlharvest.local.logview import LogView, tail
from rlharvest.local.program import Program
from rlharvest.local.restarts import Policy, Restarts

MOST_WORKERS = 256


class ProgramFailed(InfrastructureError):
    """A program ended, or did not become ready, and cannot be helped by starting it again."""


@dataclass(frozen=True)
class Plan:
    """What a launcher runs."""

    stages: tuple[tuple[Program, ...], ...]
    """Started one after the other; the programs of a stage together. One whose role is `once` runs to its end."""
    worker: Callable[[int], Program]
    """Makes rollout worker number n, from 1."""
    workers: int
    """How many at the start."""
    stop_order: tuple[str, ...]
    """Roles, first to stop first."""
    url: str = ""
    """Where the API is."""
    restarts: Policy = field(default_factory=Policy)


@dataclass
class _Kept:
    """A program that shall run, and its present process."""

    program: Program
    child: Child
    state: str = "starting"
    """starting | ready | restarting | stopping | left"""
    restarts: Restarts = field(default_factory=Restarts)
    count: int = 0
    """Times it was started again."""


class Launcher:
    """Runs one plan on one data directory, whose lock the caller holds."""

    def __init__(self, data: DataDirectory, plan: Plan, view: LogView) -> None:
        self.data = data
        self.plan = plan
        self.view = view
        self.ready = False
        self._kept: dict[str, _Kept] = {}
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._failure: ProgramFailed | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._control = ControlServer(data.control, self._command)

    async def run(self, *, on_ready: Callable[[float], None] = lambda seconds: None) -> None:
        """Run until SIGTERM, SIGINT or a failure; return when every child is gone.

        Args:
            on_ready: called once with the seconds that the start took.

        Raises:
            ProgramFailed: one did not start, or ended too often; the end of its log is in the message.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled, number)
        begin = time.monotonic()
        starting = asyncio.create_task(self._start(), name="start")
        stopped = asyncio.create_task(self._stopping.wait(), name="stopped")
        try:
            await self._control.start()
            await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not self._stopping.is_set():
                starting.result()
                self.ready = True
                self.data.write("up.json", {"pid": os.getpid(), "url": self.plan.url})
                on_ready(time.monotonic() - begin)
                await stopped
        finally:
            self._stopping.set()
            starting.cancel()
            await asyncio.gather(starting, stopped, return_exceptions=True)
            self.data.remove("up.json")
            await self._control.close()
            await self._stop()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)
        if self._failure is not None:
            raise self._failure

    async def scale(self, count: int) -> tuple[list[str], list[str]]:
        """Have `count` rollout workers; return the names of those started and of those told to leave.

        Raises:
            InvalidField: the number is out of range.
        """
        if not 0 <= count <= MOST_WORKERS:
            raise InvalidField("rollout", count, "not a number of workers", f"Give one from 0 to {MOST_WORKERS}.")
        numbers = {
            int(name.rpartition("-")[2]): kept
            for name, kept in self._kept.items()
            if kept.program.role == "rollout" and kept.state not in ("stopping", "left")
        }
        leaving = sorted(numbers)[count:]
        started: list[str] = []
        number = 0
        while len(numbers) + len(started) < count:
            number += 1
            name = self.plan.worker(number).name
            # A number whose worker is still on its way out is left out: its log file and its name are in use.
            if number not in numbers and (name not in self._kept or self._kept[name].state == "left"):
                kept = await self._launch(self.plan.worker(number))
                self._spawn(self._note_ready(kept, kept.child), f"ready/{name}")
                started.append(name)
        for number in leaving:
            numbers[number].state = "stopping"
            self._spawn(self._leave(numbers[number]), f"leave/{number}")
        return started, [numbers[number].program.name for number in leaving]

    async def _start(self) -> None:
        for programs in self.plan.stages:
            await asyncio.gather(*(self._launch_and_wait(program) for program in programs))
        workers = [self.plan.worker(number) for number in range(1, self.plan.workers + 1)]
        await asyncio.gather(*(self._launch_and_wait(worker) for worker in workers))

    async def _launch_and_wait(self, program: Program) -> None:
        begin = time.monotonic()
        if program.role == "once":
            await self._once(program)
        else:
            kept = await self._launch(program)
            await self._until_ready(kept)
        self.view.say(
            f"{program.name} is {'done' if program.role == 'once' else 'ready'} ({time.monotonic() - begin:.1f} s)"
        )

    async def _once(self, program: Program) -> None:
        child = self._child(program)
        await child.start()
        try:
            async with asyncio.timeout(program.ready_s):
                code = await child.wait()
        except TimeoutError:
            raise self._failed(program, f"was not done after {program.ready_s:g} s") from None
        finally:
            await child.stop(grace_s=1.0)
        if code != 0:
            raise self._failed(program, _ended(code))

    async def _launch(self, program: Program) -> _Kept:
        kept = _Kept(program, self._child(program), restarts=Restarts(self.plan.restarts))
        self._kept[program.name] = kept
        await kept.child.start()
        self._record()
        self._spawn(self._keep(kept), f"keep/{program.name}")
        return kept

    async def _until_ready(self, kept: _Kept) -> None:
        """Wait until a program is ready.

        Raises:
            ProgramFailed: it ended too often, or the time is over.
        """
        program = kept.program
        limit = time.monotonic() + program.ready_s
        told = time.monotonic() + 5.0
        while kept.state != "ready":
            problem = await program.probe.problem() if program.probe else None
            if problem is None and kept.child.code is None:
                kept.state = "ready"
                return
            if self._failure is not None:
                raise self._failure
            if kept.state == "left":
                raise self._failed(program, "left before it was ready")
            now = time.monotonic()
            if now > limit:
                raise self._failed(program, f"was not ready after {program.ready_s:g} s ({problem})")
            if now > told:
                self.view.say(f"waiting for {program.name}: {problem}")
                told = now + 5.0
            await asyncio.sleep(0.05)

    async def _keep(self, kept: _Kept) -> None:
        """Start a program again whenever it ends, until it shall stop."""
        while True:
            code = await kept.child.wait()
            if self._stopping.is_set() or kept.state == "stopping":
                return
            kept.child.kill()  # what it left in its group would keep its port or its files
            name = kept.program.name
            if code == 0 and kept.program.may_leave:
                kept.state = "left"
                self.view.say(f"{name} left in order; `rlharvest scale N` starts another")
                self._record()
                return
            pause = kept.restarts.ended(time.monotonic())
            if pause is None or (not self.ready and kept.count >= 1):
                often = (
                    f" {len(kept.restarts.ends)} times in {self.plan.restarts.window_s:g} s" if pause is None else ""
                )
                self._fail(self._failed(kept.program, _ended(code) + often))
                return
            self.view.say(f"{name} {_ended(code)}; starting it again in {pause:.1f} s", level="warning")
            kept.state = "restarting"
            await asyncio.sleep(pause)
            if self._stopping.is_set() or kept.state != "restarting":
                return
            kept.count += 1
            kept.child = self._child(kept.program)
            await kept.child.start()
            self._record()
            self._spawn(self._note_ready(kept, kept.child), f"ready/{name}")

    async def _note_ready(self, kept: _Kept, child: Child) -> None:
        """Say when a program is ready that was started in between; should it end first, `_keep` sees that."""
        while kept.child is child and child.code is None and kept.state in ("starting", "restarting"):
            if kept.program.probe is None or await kept.program.probe.problem() is None:
                kept.state = "ready"
                again = " again" if kept.count else ""
                self.view.say(f"{kept.program.name} is ready{again} ({time.monotonic() - child.started_at:.1f} s)")
                return
            await asyncio.sleep(0.1)

    async def _leave(self, kept: _Kept) -> None:
        name = kept.program.name
        in_time = await kept.child.stop()
        kept.state = "left"
        self.view.say(
            f"{name} left" if in_time else f"{name} did not leave in {kept.program.grace_s:g} s and was killed"
        )
        self._record()

    async def _stop(self) -> None:
        """Stop all, role by role; a second signal kills what is left."""
        for role in self.plan.stop_order:
            members = [kept for kept in self._kept.values() if kept.program.role == role and kept.child.code is None]
            if members:
                self.view.say("stopping " + ", ".join(kept.program.name for kept in members))
            for kept in members:
                kept.state = "stopping"
            stops = [asyncio.create_task(kept.child.stop()) for kept in members]
            hurry = asyncio.create_task(self._hurry.wait())
            while stops and not all(stop.done() for stop in stops) and not hurry.done():
                await asyncio.wait([*stops, hurry], return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            if self._hurry.is_set():
                for kept in members:
                    kept.child.kill()
            for kept, in_time in zip(members, await asyncio.gather(*stops), strict=True):
                if not in_time:
                    self.view.say(
                        f"{kept.program.name} did not stop in {kept.program.grace_s:g} s and was killed",
                        level="warning",
                    )
        for kept in self._kept.values():
            kept.child.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for kept in self._kept.values():
            if kept.child.code is None:  # started while its keeper was being cancelled
                await kept.child.stop(grace_s=0.0)
        self.data.remove("pids.json")

    async def _command(self, request: dict[str, Any]) -> dict[str, Any]:
        verb = request.get("verb")
        if verb == "ps":
            return {"pid": os.getpid(), "ready": self.ready, "url": self.plan.url, "programs": self._programs()}
        if verb == "scale":
            count = request.get("rollout")
            if not isinstance(count, int) or self._stopping.is_set() or not self.ready:
                raise InvalidField(
                    "rollout", count, "cannot scale now", "Give a number, after the start and before the stop."
                )
            started, stopping = await self.scale(count)
            self.view.say(
                f"scale to {count}: "
                + (", ".join([*(f"+{n}" for n in started), *(f"-{n}" for n in stopping)]) or "as is")
            )
            return {"started": started, "stopping": stopping}
        raise InvalidField("verb", verb, "unknown", "Verbs: ps, scale.")

    def _programs(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [
            {
                "name": name,
                "role": kept.program.role,
                "pid": kept.child.pid,
                "state": kept.state,
                "seconds": round(now - kept.child.started_at, 1),
                "restarts": kept.count,
                "log": str(kept.child.log),
            }
            for name, kept in self._kept.items()
            if kept.state != "left"
        ]

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(ProgramFailed(f"{task.get_name()}: {error!r}"))

    def _child(self, program: Program) -> Child:
        def show(line: str) -> None:
            kept = self._kept.get(program.name)
            if program.quiet and (kept is None or kept.state in ("starting", "restarting")):
                return  # what a server warns of while it starts is shown with the end of its log, should it fail
            self.view.show(program.name, line, quiet=program.quiet)

        return Child(program, self.data.logs, show)

    def _record(self) -> None:
        """Keep pids.json: what a later launcher would have to end."""
        running = {name: kept for name, kept in self._kept.items() if kept.child.pid and kept.child.code is None}
        self.data.write(
            "pids.json",
            {name: stale.record(kept.child.pid, list(kept.program.command)) for name, kept in running.items()},
        )

    def _failed(self, program: Program, what: str) -> ProgramFailed:
        log = self.data.logs / f"{program.name}.log"
        end = "\n".join(f"    {line}" for line in tail(log))
        return ProgramFailed(f"{program.name} {what}. The end of {log}:\n{end or '    (nothing was written)'}")

    def _fail(self, failure: ProgramFailed) -> None:
        self._failure = self._failure or failure
        self._stopping.set()

    def _signalled(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            self._hurry.set()
            return
        self.view.say(f"{number.name}: stopping everything; once more kills what is left")
        self._stopping.set()


def _ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
