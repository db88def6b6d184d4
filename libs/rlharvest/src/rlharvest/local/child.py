"""One process of a program: started through the shim, its output read line by line, stopped within a time limit.

Invariants: a child is the leader of a session and process group of its own, so that Ctrl-C reaches the launcher alone
and a kill reaches what the child started; every line it prints is in its log file.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rlharvest.local import exec as shim
from rlharvest.local.logview import open_log
from rlharvest.local.program import Program

_LINE_BYTES = 1 << 20


class Child:
    """A running program."""

    def __init__(self, program: Program, logs: Path, show: Callable[[str], None]) -> None:
        self.program = program
        self.log = logs / f"{program.name}.log"
        self.started_at = 0.0
        """time.monotonic()"""
        self._show = show
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._swept = False

    @property
    def pid(self) -> int:
        """Its pid, which is also its process group; 0 before the start."""
        return self._process.pid if self._process else 0

    @property
    def code(self) -> int | None:
        """Exit code; negative: the signal that ended it; None while it runs."""
        return self._process.returncode if self._process else None

    async def start(self) -> None:
        """Start it; does not wait until it is ready."""
        # The pipe is ours: with one of asyncio's an end is seen only when all that hold the pipe have ended.
        read_end, write_end = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", shim.__file__, str(os.getpid())),
                *self.program.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env={**os.environ, **self.program.environment},
                start_new_session=True,
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self.started_at = time.monotonic()
        self._reader = asyncio.create_task(self._read(read_end), name=f"log/{self.program.name}")

    async def wait(self) -> int:
        """Wait until it ended and all it printed was read; return its exit code."""
        if self._process is None or self._reader is None:
            raise RuntimeError(f"{self.program.name} was not started")
        code = await self._process.wait()
        # What it started may still hold the pipe open; that is not waited for long.
        await asyncio.wait([self._reader], timeout=0.2)
        return code

    async def stop(self, *, grace_s: float | None = None) -> bool:
        """SIGTERM, then SIGKILL for its whole group; return whether it left by itself in time."""
        in_time = True
        if self._process is not None and self.code is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(self.program.grace_s if grace_s is None else grace_s):
                    await self._process.wait()
            except TimeoutError:
                in_time = False
        self.kill()
        if self._reader is not None:
            await self.wait()
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        return in_time

    def kill(self) -> None:
        """SIGKILL it and whatever is left of its group."""
        if self.pid and not self._swept:
            # Once, at its end: later the number may name a group of somebody else.
            self._swept = self.code is not None
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # the group is empty

    async def _read(self, read_end: int) -> None:
        reader = asyncio.StreamReader(limit=_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
        )
        try:
            with open_log(self.log) as file:
                while raw := await _line(reader):
                    file.write(raw)
                    file.flush()
                    self._show(raw.decode(errors="replace").rstrip("\r\n"))
        finally:
            transport.close()


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line, a piece of one that is longer than the limit, or nothing at the end."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await reader.read(error.consumed)
