"""The service's side of one child process: start in its sandbox, call with a time limit, kill with everything it started.

Invariants: a call ends within its time limit plus the time of a kill; after a fault of the process itself (timeout,
memory, crash, an answer that is none) `usable` is false and nothing of its session is left; between calls the whole
session stands still; prints never block the child for long and never use more than OUTPUT_BYTES here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
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

from rlharvest_reward import frames, replies, usage
from rlharvest_reward.fault import RewardFault
from rlharvest_reward.replies import Reply
from rlharvest_reward.sandbox import Sandbox

log = structlog.get_logger(__name__)

OUTPUT_BYTES = 16 << 10
"""Newest bytes of a child's prints that are kept."""

PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
"""Variables of the service's environment that its children get; none of them holds a secret."""

_KILL_ROUNDS = 50

_PART = 1 << 16
_PACE_S = 0.001
"""Pause after a full part of prints: who prints without end is slowed down to 64 MB/s and takes little of this process."""

_LOOK_S = 0.1
"""How often the sum of what a call uses is looked at."""

_GONE_S, _GONE_LOOKS = 5.0, 500
"""How long the processes of a killed session may take to end, and how often they are looked for."""


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


def kill_tree(pid: int, *, one_group: bool) -> None:
    """SIGKILL a session leader, its group, and its descendants in other groups.

    Where nothing can leave the group (`one_group`) the kernel kills all at once, however fast they multiply. Else the
    leader is stopped first and dies last: it adopts orphans, so whatever left the group is still found below it.
    """
    if one_group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        return
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
    """A child process that holds one loaded reward function. Make it with `start`.

    Attributes:
        walls: of its sandbox, that stand.
    """

    def __init__(self, label: str, memory_mb: int, directory: Path) -> None:
        self.label = label
        self.memory_mb = memory_mb
        self.usable = True
        self.walls: list[str] = []
        self.output = bytearray()
        self.output_total = 0
        self._excess: usage.Excess | None = None
        self._directory = directory
        self._tasks: list[asyncio.Task[Any]] = []

    @classmethod
    async def start(cls, spec: dict[str, Any], *, sandbox: Sandbox, load_timeout_s: float) -> RewardProcess:
        """Start a child in its sandbox and have it load a function.

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
            walls = {"sandbox": sandbox.message(), "memory_mb": spec["memory_mb"], "file": spec["path"]}
            process.walls = (await process._exchange(walls, load_timeout_s, "starting")).walls
            await process._exchange({"load": spec}, load_timeout_s, "loading")
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
        while part := await prints.read(_PART):
            self.output_total += len(part)
            self.output += part
            del self.output[:-OUTPUT_BYTES]
            if len(part) == _PART:
                await asyncio.sleep(_PACE_S)

    async def score(self, sample: dict[str, Any], timeout_s: float) -> float | None:
        """Return the reward of one sample (None: the function says nothing about it).

        Raises:
            RewardFault: what the function did instead; look at `usable` afterwards.
        """
        return (await self._exchange({"sample": sample}, timeout_s, "scoring")).value

    async def _exchange(self, message: dict[str, Any], timeout_s: float, doing: str) -> Reply:
        try:
            self._signal(signal.SIGCONT)
            reply = await self._answer(message, timeout_s, doing)
            # Threads and processes that the function has left behind do not run on.
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.usable = False  # also when the call is cancelled: an answer would come too late for the next one
            raise
        if reply.fault is not None:
            # After running out of memory no state of the process can be trusted.
            self.usable = reply.fault.kind != "memory"
            raise RewardFault(reply.fault.kind, reply.fault.message, function=reply.fault.function)
        return reply

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it died: the end of the stream tells
            os.killpg(self.pid, number)

    async def _answer(self, message: dict[str, Any], timeout_s: float, doing: str) -> Reply:
        call = secrets.token_hex(8)

        async def talk() -> dict[str, Any] | None:
            self._writer.write(frames.encode({"call": call, **message}))
            with contextlib.suppress(ConnectionError):  # it died: the end of the stream tells
                await self._writer.drain()
            return await frames.read(self._reader)

        talking = asyncio.create_task(talk())
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({talking, self._ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                # Its last words may still be on the way; a descendant that holds the socket would never end them.
                await asyncio.wait({talking}, timeout=0.2)
            if talking.done():
                answer = talking.result()
                if answer is not None:
                    return replies.read(answer, call)
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
            watching.cancel()
            await asyncio.gather(talking, watching, return_exceptions=True)

    async def _watch(self) -> None:
        """Kill the child when it uses too much in sum."""
        while self._excess is None:
            await asyncio.sleep(_LOOK_S)
            seen = await asyncio.to_thread(usage.look, self.pid, os.fspath(self._directory))
            self._excess = usage.excess(seen, self.memory_mb)
        self._kill()

    def _kill(self) -> None:
        kill_tree(self.pid, one_group="calls" in self.walls)

    def _crash(self, doing: str) -> RewardFault:
        code = self._child.returncode
        if self._excess is not None:
            kind, why = self._excess
            return RewardFault(kind, f"{self.label} was killed: {why}", function=self.label)
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
            self._kill()
            await asyncio.wait({self._ended})
            await self._until_gone()
            self._prints.close()
            self._writer.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        # A tree that is deeper than any path is too deep for Python's own ways.
        remove = await asyncio.create_subprocess_exec("rm", "-rf", "--", self._directory)
        await remove.wait()

    async def _until_gone(self) -> None:
        for _ in range(_GONE_LOOKS):
            if not await asyncio.to_thread(usage.group_alive, self.pid):
                return
            await asyncio.sleep(_GONE_S / _GONE_LOOKS)
        log.warning("reward.not_gone", function=self.label, group=self.pid, seconds=_GONE_S)
