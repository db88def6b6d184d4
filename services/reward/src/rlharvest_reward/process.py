"""The service's side of one child process: start, call with a time limit, kill with everything it started.

Invariants: a call ends within its time limit plus the time of a kill; after a fault of the process itself (timeout,
memory, crash) `usable` is false and nothing of its session is left; prints never block the child and never use more
than OUTPUT_BYTES here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import structlog
from rlharvest.errors import CorruptData

from rlharvest_reward import frames
from rlharvest_reward.fault import RewardFault

log = structlog.get_logger(__name__)

OUTPUT_BYTES = 16 << 10
"""Newest bytes of a child's prints that are kept."""

PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
"""Variables of the service's environment that its children get; none of them holds a secret."""

_KILL_ROUNDS = 50


def environment(directory: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child whose home and scratch space is `directory`."""
    return {
        **{key: inherited[key] for key in PASSED_ON if key in inherited},
        "HOME": os.fspath(directory),
        "TMPDIR": os.fspath(directory),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def kill_tree(pid: int) -> None:
    """SIGKILL a session leader, its group, and its descendants in other groups.

    The leader is stopped first and dies last: it adopts orphans, so whatever left the group is still found below it.
    """
    try:
        leader = psutil.Process(pid)
        leader.suspend()
        for _ in range(_KILL_ROUNDS):
            alive = [each for each in leader.children(recursive=True) if _running(each)]
            if not alive:
                break
            for each in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
    except psutil.NoSuchProcess:
        pass  # the leader has ended; its group may live on
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


class RewardProcess:
    """A child process that holds one loaded reward function. Make it with `start`."""

    def __init__(self, label: str, memory_mb: int, directory: Path) -> None:
        self.label = label
        self.memory_mb = memory_mb
        self.usable = True
        self.output = bytearray()
        self.output_total = 0
        self._directory = directory
        self._tasks: list[asyncio.Task[Any]] = []

    @classmethod
    async def start(cls, spec: dict[str, Any], *, load_timeout_s: float) -> RewardProcess:
        """Start a child and have it load a function.

        Args:
            spec: as rlharvest_reward.functions.Function takes it, and `memory_mb`.
            load_timeout_s: longest time for the interpreter's start and the import.

        Raises:
            RewardFault: the function could not be loaded; nothing is left of the child.
        """
        label = spec["builtin"] or f"{Path(spec['path']).name}:{spec['name']}"
        directory = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="rlharvest-reward-"))
        process = cls(label, spec["memory_mb"], directory)
        try:
            await process._spawn()
            await process._exchange(spec, load_timeout_s, "loading")
        except BaseException:
            await process.close()
            raise
        return process

    async def _spawn(self) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        try:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-m", "rlharvest_reward.child", str(theirs.fileno()), str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                cwd=self._directory,
                env=environment(self._directory, os.environ),
            )
        finally:
            theirs.close()
            os.close(write_end)
        self.pid = self._child.pid
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        prints = asyncio.StreamReader()
        self._prints, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(prints), os.fdopen(read_end, "rb", buffering=0)
        )
        self._ended = asyncio.create_task(self._child.wait())
        self._tasks = [self._ended, asyncio.create_task(self._drain(prints))]

    async def _drain(self, prints: asyncio.StreamReader) -> None:
        while part := await prints.read(1 << 16):
            self.output_total += len(part)
            self.output += part
            del self.output[:-OUTPUT_BYTES]

    async def score(self, sample: dict[str, Any], timeout_s: float) -> float | None:
        """Return the reward of one sample (None: the function says nothing about it).

        Raises:
            RewardFault: what the function did instead; look at `usable` afterwards.
        """
        answer = await self._exchange(sample, timeout_s, "scoring")
        value = answer.get("value")
        return None if value is None else float(value)

    async def _exchange(self, message: dict[str, Any], timeout_s: float, doing: str) -> dict[str, Any]:
        try:
            answer = await self._answer(message, timeout_s, doing)
        except BaseException:
            self.usable = False  # also when the call is cancelled: an answer would come too late for the next one
            raise
        if fault := answer.get("fault"):
            # After running out of memory no state of the process can be trusted.
            self.usable = fault["kind"] != "memory"
            raise RewardFault(fault["kind"], fault["message"], function=fault["function"])
        return answer

    async def _answer(self, message: dict[str, Any], timeout_s: float, doing: str) -> dict[str, Any]:
        async def talk() -> dict[str, Any] | None:
            self._writer.write(frames.encode(message))
            with contextlib.suppress(ConnectionError):  # it died: the end of the stream tells
                await self._writer.drain()
            return await frames.read(self._reader)

        talking = asyncio.create_task(talk())
        try:
            await asyncio.wait({talking, self._ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                # Its last words may still be on the way; a descendant that holds the socket would never end them.
                await asyncio.wait({talking}, timeout=0.2)
            if talking.done():
                answer = talking.result()
                if answer is not None:
                    return answer
                await asyncio.wait({self._ended}, timeout=1.0)
                raise self._crash(doing)
            if self._ended.done():
                raise self._crash(doing)
            raise RewardFault(
                "timeout",
                f"{self.label} was not done with {doing} after {timeout_s:g} s, and its process was killed. "
                + ("Raise timeout_s, or make it faster" if doing == "scoring" else "Make its import faster"),
                function=self.label,
            )
        except CorruptData as error:
            raise RewardFault("crashed", f"{self.label} broke the protocol: {error}", function=self.label) from error
        finally:
            talking.cancel()
            await asyncio.gather(talking, return_exceptions=True)

    def _crash(self, doing: str) -> RewardFault:
        code = self._child.returncode
        if code is None:
            how = "closed its descriptors"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit status {code}"
        if code == -signal.SIGKILL:
            message = f"{self.label}: its process {how} from outside while {doing}, most likely for lack of memory"
            return RewardFault("memory", message, function=self.label)
        said = self.last_output(400)
        message = f"{self.label}: its process {how} while {doing}" + (f"; it printed last: {said}" if said else "")
        return RewardFault("crashed", message, function=self.label)

    def last_output(self, most: int = OUTPUT_BYTES) -> str:
        """Return the end of what the child has printed."""
        return bytes(self.output[-most:]).decode("utf-8", "replace").strip()

    async def close(self) -> None:
        """Kill the child with everything it started, and remove its directory."""
        self.usable = False
        if hasattr(self, "_ended"):
            kill_tree(self.pid)
            await asyncio.wait({self._ended})
            self._prints.close()
            self._writer.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
