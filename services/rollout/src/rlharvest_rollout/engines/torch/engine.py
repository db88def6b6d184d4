"""The torch engine: a thread that generates, and the event loop's side of it.

The thread owns the runner and all that is in it; the loop sends it closures, which it calls between two steps, in
order. A version is read by another thread while the old one goes on, so at most two versions are in memory, and the
switch is the exchange of one reference. torch releases the interpreter lock while it computes, so the loop keeps
beating.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
import torch
from rlharvest.engine import EngineBroken, EngineConfig, EngineStats, Request
from rlharvest.errors import Conflict, InvalidField
from rlharvest.spans import Span

from rlharvest_rollout.engines.outbox import Outbox
from rlharvest_rollout.engines.stops import StopTexts
from rlharvest_rollout.engines.torch.architecture import Architecture, read_architecture
from rlharvest_rollout.engines.torch.checkpoint import read_weights
from rlharvest_rollout.engines.torch.model import Model
from rlharvest_rollout.engines.torch.numerics import Numerics
from rlharvest_rollout.engines.torch.runner import Loaded, Runner

log = structlog.get_logger(__name__)


class TorchEngine:
    """An `rlharvest.engine.Engine` of plain torch, on a GPU if there is one."""

    def __init__(
        self,
        *,
        threads: int = 1,
        slots: int = 64,
        kv_memory_bytes: int = 1 << 30,
        draft_memory_bytes: int = 1 << 28,
        device: str | None = None,
    ) -> None:
        """Set up without starting anything.

        Args:
            threads: of torch, for the whole process.
            slots: most sequences that run at a time, whatever a job asks for.
            kv_memory_bytes: bound of the memory for keys and values; sequences beyond it wait.
            draft_memory_bytes: bound of the memory for what drafts are made of; the oldest epochs go first.
            device: a torch device; None: "cuda" if there is one, else "cpu".
        """
        self.slots = slots
        self._threads = threads
        self._kv_memory_bytes = kv_memory_bytes
        self._draft_memory_bytes = draft_memory_bytes
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._config = EngineConfig(slots=slots, context=1, options={})
        self._inbox: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        """Each returns whether the thread goes on."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._calls: set[asyncio.Future[None]] = set()
        self._outbox = Outbox(self._wake)
        self._renew(self._config)
        self._loaded: Loaded | None = None
        self._changing = asyncio.Lock()
        self._paused = False
        self._thread: threading.Thread | None = None
        self._closed = False
        self._stop_texts = StopTexts()
        torch.set_num_threads(threads)

    @property
    def version(self) -> int | None:
        """Version that samples now."""
        return self._loaded.version if self._loaded is not None else None

    @property
    def numerics_key(self) -> str:
        """What decides the bits; see `Numerics.key`."""
        return self._numerics().key

    @property
    def batch_invariant(self) -> bool:
        """Whether a continuation is bit-exact: asked for, and, once a model is loaded, found true of this machine."""
        return self._config.batch_invariant and (self._loaded is None or self._loaded.model.invariant)

    async def start(self, config: EngineConfig) -> None:
        """Get ready for a job: no version, no request."""
        if self._closed:
            raise EngineBroken("the engine is closed")
        async with self._changing:
            self._loop = asyncio.get_running_loop()
            self._outbox.forget_all()
            self._config, self._loaded, self._paused = config, None, False
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="torch-engine", daemon=True)
                self._thread.start()
            await self._call(lambda: self._renew(config))

    async def load(self, directory: Path, version: int) -> None:
        """Switch to the weights in a directory between two tokens; see `Engine.load`."""
        async with self._changing:
            if self.version == version:
                return
            loaded = await asyncio.to_thread(self._read, directory, version)
            await self._call(lambda: self._runner.install(loaded))
            self._loaded = loaded
        if self._config.batch_invariant and not loaded.model.invariant:
            log.warning("engine.not_invariant", numerics=self.numerics_key)

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests.

        Raises:
            Conflict: no version is loaded.
            InvalidField: a request does not fit the job's context or the model; none of them is taken.
        """
        self._check()
        if self._loaded is None:
            raise Conflict("the engine has loaded no version yet")
        for request in requests:
            self._fits(request, self._loaded)
        accepted = [request for request in requests if self._outbox.want(request.handle, request.attempt)]
        self._post(lambda: self._runner.submit(accepted))

    def abort(self, handles: Sequence[tuple[int, int]]) -> None:
        """Forget these (handle, attempt) pairs."""
        keys = set(handles)
        self._outbox.forget(keys)
        self._post(lambda: self._runner.abort(keys))

    async def spans(self) -> list[Span]:
        """Wait for new tokens; return all there are."""
        while True:
            self._news.clear()
            if spans := self._outbox.take():
                return spans
            await self._news.wait()

    def pause(self) -> None:
        """Generate nothing until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Go on."""
        self._paused = False
        self._post(lambda: None)

    def stats(self) -> EngineStats:
        """Return the counters of this job."""
        return self._runner.stats()

    @property
    def draft_memory(self) -> int:
        """Bytes of what drafts are made of."""
        return self._runner.draft_memory

    async def close(self) -> None:
        """Stop the thread and free the memory."""
        self._closed = True
        self._outbox.fail(EngineBroken("the engine is closed"))
        if self._thread is not None:
            self._inbox.put(lambda: False)
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        self._renew(self._config)
        self._loaded = None

    def _numerics(self) -> Numerics:
        config = self._config
        return Numerics(
            dtype=config.dtype,
            invariant=config.batch_invariant,
            threads=self._threads,
            device=self._device,
            weights=config.options.get("weights", "full"),
        )

    def _fits(self, request: Request, loaded: Loaded) -> None:
        field = f"requests[{request.handle}]"
        longest = len(request.prompt) + request.budget
        if len(request.prompt) == 0:
            raise InvalidField(f"{field}.prompt", [], "it is empty", "Give at least one token.")
        if longest > self._config.context:
            raise InvalidField(
                f"{field}.budget",
                request.budget,
                f"with its prompt that is {longest} tokens, the context is {self._config.context}",
                "Lower it.",
            )
        top = max(int(ids.max()) for ids in (request.prompt, request.prefix) if len(ids))
        if top >= loaded.model.shape.vocab:
            raise InvalidField(
                f"{field}.prompt",
                top,
                f"the model has {loaded.model.shape.vocab} tokens",
                "Use the model's own tokenizer.",
            )
        if request.sampling.stop and loaded.stop_text is None:
            raise InvalidField(
                "sampling.stop",
                list(request.sampling.stop),
                "the model directory has no tokenizer.json",
                "Add it, or remove the stop strings.",
            )

    @torch.inference_mode()
    def _read(self, directory: Path, version: int) -> Loaded:
        """Read a version; runs in a thread of its own while the old one serves."""
        torch.set_num_threads(self._threads)
        numerics = self._numerics()
        shape: Architecture = read_architecture(directory)
        weights = read_weights(directory, shape, numerics)
        model = Model(shape, weights, numerics, context=self._config.context)
        return Loaded(version=version, model=model, stop_text=self._stop_texts.read(directory / "tokenizer.json"))

    def _renew(self, config: EngineConfig) -> None:
        self._runner = Runner(
            config,
            self._outbox,
            slots=min(self.slots, config.slots),
            kv_memory_bytes=self._kv_memory_bytes,
            draft_memory_bytes=self._draft_memory_bytes,
            # With one thread, all of a step is computed on the engine's own: its processor time does not grow while other
            # processes run. What other threads or a GPU compute is seen on the wall only.
            clock=time.thread_time if self._device == "cpu" and self._threads == 1 else time.perf_counter,
        )

    def _check(self) -> None:
        if self._outbox.failure is not None:
            raise self._outbox.failure

    def _post(self, action: Callable[[], None]) -> None:
        """Let the thread call `action` between two steps."""

        def call() -> bool:
            action()
            return True

        self._inbox.put(call)

    async def _call(self, action: Callable[[], None]) -> None:
        """Let the thread call `action` between two steps; raise what it raises."""
        self._check()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def call() -> bool:
            try:
                action()
            except Exception as error:  # noqa: BLE001  # it is raised where it was asked for
                loop.call_soon_threadsafe(settle, error)
            else:
                loop.call_soon_threadsafe(settle, None)
            return True

        self._calls.add(done)
        done.add_done_callback(self._calls.discard)
        self._inbox.put(call)
        await done

    def _wake(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._woken)

    def _woken(self) -> None:
        self._news.set()
        if self._outbox.failure is not None:
            for call in list(self._calls):
                if not call.done():
                    call.set_exception(self._outbox.failure)

    def _work(self) -> None:
        """The thread: commands first, then a step, as long as there is anything to do."""
        torch.set_num_threads(self._threads)
        try:
            while True:
                idle = self._paused or not self._runner.busy
                if not idle and self._inbox.empty():
                    self._runner.step()
                elif not self._inbox.get()():
                    return
        except Exception as error:
            log.exception("engine.broken")
            broken = EngineBroken(f"the engine died: {error!r}")
            broken.__cause__ = error
            self._outbox.fail(broken)
