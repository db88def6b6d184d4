"""Makes the faults of a schedule happen to a running system.

What each kind really is:

- kill: SIGKILL of the process, and its start again some seconds later. empty: the same for NATS, whose files are deleted
  in between. restart: SIGTERM, and its start again.
- stop: SIGSTOP, and SIGCONT some seconds later; every connection stays open meanwhile.
- black_hole, slow_link: in the TCP proxy between a client and NATS or Valkey (rlharvest.testing.proxy).
- slow_disk: the server is stopped and continued ten times a second, so each of its writes takes long, as everything else
  that it does. The disk itself is not slowed: that needs rights over the machine.
- clock: the process's own clocks, as its code sees them (rlharvest.testing.faults): the wall clock jumps to and fro by up
  to an hour; the coordinator's deadlines see their monotonic clock jump forward by up to six seconds. The system's clock
  is not touched.
- duplicate, late: messages that passed on the bus are published once more (benchmarks.echo).
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable

from rlharvest.testing.faults import CLOCK, set_clock, with_faults
from rlharvest.testing.proxy import Proxy
from rlharvest.testing.servers import Child
from rlharvest.testing.system import Service, System

from benchmarks.echo import Echo
from benchmarks.schedule import Fault

PULSE_S = 0.1
MONOTONIC_SHARE = 1 / 600
"""Of a wall clock's jump, that the coordinator's monotonic clock makes forward."""

Undo = Callable[[], None]


class Storm:
    """Knows every process and every link. Use as a context; it must be made before the system starts."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.services: dict[str, Service] = {
            service.name: with_faults(service)
            for service in (*system.workers, system.coordinator, system.trainer, system.reward, system.weights)
        }
        self.servers: dict[str, Child] = {"nats": system.nats, "valkey": system.valkey}
        self.links: dict[str, Proxy] = {}
        self._wall: dict[str, float] = {}
        self._monotonic: dict[str, float] = {}
        for service in self.services.values():
            service.environment[CLOCK] = str(system.directory / f"{service.name}.clock")
        for worker in system.workers:
            self._link(worker.name, worker, "RLHARVEST_NATS_URL")
        self._link("coordinator>nats", system.coordinator, "RLHARVEST_NATS_URL")
        self._link("coordinator>valkey", system.coordinator, "RLHARVEST_REDIS_URL")

    def _link(self, name: str, service: Service, variable: str) -> None:
        proxy = self.links[name] = Proxy(service.environment[variable]).start()
        service.environment[variable] = proxy.url

    def close(self) -> None:
        """Stop the proxies."""
        for proxy in self.links.values():
            proxy.stop()

    def apply(self, fault: Fault, echo: Echo) -> Undo | None:
        """Make a fault happen; return what ends it, to be called after its seconds, or None if nothing has to."""
        match fault.kind:
            case "kill" | "empty" | "restart":
                return self._down(fault)
            case "stop":
                victim = self._process(fault.target)
                victim.signal(signal.SIGSTOP)
                return lambda: victim.signal(signal.SIGCONT)
            case "black_hole":
                self.links[fault.target].swallow()
                return self.links[fault.target].forward
            case "slow_link":
                return self._slow(self.links[fault.target], fault.amount)
            case "slow_disk":
                return self._pulse(self.servers[fault.target], fault.amount)
            case "clock":
                self._jump(fault.target, fault.amount)
            case "duplicate":
                echo.duplicate(int(fault.amount))
            case "late":
                echo.late(int(fault.amount))
        return None

    def _process(self, name: str) -> Service | Child:
        return self.servers.get(name) or self.services[name]

    def _down(self, fault: Fault) -> Undo:
        victim = self._process(fault.target)
        if fault.kind == "restart":
            victim.stop()
        else:
            victim.kill()
        if fault.kind == "empty":
            shutil.rmtree(victim.directory / "jetstream")

        def up() -> None:
            victim.start()

        return up

    def _slow(self, link: Proxy, seconds: float) -> Undo:
        link.delay_s = seconds

        def fast() -> None:
            link.delay_s = 0.0

        return fast

    def _pulse(self, server: Child, share: float) -> Undo:
        over = threading.Event()

        def pulse() -> None:
            while not over.is_set():
                server.signal(signal.SIGSTOP)
                time.sleep(PULSE_S * share)
                server.signal(signal.SIGCONT)
                time.sleep(PULSE_S * (1 - share))

        thread = threading.Thread(target=pulse, name="slow-disk", daemon=True)
        thread.start()

        def end() -> None:
            over.set()
            thread.join()

        return end

    def _jump(self, name: str, seconds: float) -> None:
        self._wall[name] = seconds
        if name == "coordinator":
            self._monotonic[name] = self._monotonic.get(name, 0.0) + abs(seconds) * MONOTONIC_SHARE
        path = self.system.directory / f"{name}.clock"
        set_clock(path, wall_s=self._wall[name], monotonic_s=self._monotonic.get(name, 0.0))
