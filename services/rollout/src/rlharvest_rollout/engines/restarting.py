"""An engine that starts again when it breaks, and goes on with its responses from the tokens it had handed out.

For engines whose processes may die on their own. Invariants: a token that `spans` returned is never generated again, and
none is lost in between; whoever uses it sees a pause, no error, unless it breaks more than `MOST` times within `WITHIN_S`
or cannot start again: then `spans` raises EngineBroken, as any engine does.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import structlog
from rlharvest.engine import Engine, EngineBroken, EngineConfig, EngineStats, Request
from rlharvest.errors import InvalidField, RlharvestError, Unavailable
from rlharvest.spans import Finish, Span

log = structlog.get_logger(__name__)

MOST = 3
WITHIN_S = 600.0


class RestartingEngine:
    """An `rlharvest.engine.Engine` around others, of which one at a time runs."""

    def __init__(self, make: Callable[[], Engine], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Set up without starting anything.

        Args:
            make: returns a new engine.
            clock: seconds, for the bound on restarts.
        """
        self._make = make
        self._clock = clock
        self._engine = make()
        self._config: EngineConfig | None = None
        self._loaded: tuple[Path, int] | None = None
        self._requests: dict[int, Request] = {}
        self._ids: dict[int, list[int]] = {}
        """Tokens of each response that were handed out, its prefix included."""
        self._paused = self._restarting = self._closed = False
        self._lock = asyncio.Lock()
        self._restarts: deque[float] = deque(maxlen=MOST)

    @property
    def version(self) -> int | None:
        """Version that samples now, or will again in a moment."""
        return self._loaded[1] if self._loaded is not None else None

    @property
    def numerics_key(self) -> str:
        """See `Engine`."""
        return self._engine.numerics_key

    @property
    def batch_invariant(self) -> bool:
        """See `Engine`."""
        return self._engine.batch_invariant

    async def start(self, config: EngineConfig) -> None:
        """See `Engine`."""
        self._config, self._loaded, self._paused = config, None, False
        self._requests.clear()
        self._ids.clear()
        await self._engine.start(config)

    async def load(self, directory: Path, version: int) -> None:
        """See `Engine`.

        Raises:
            Unavailable: the engine broke over it and serves the version before again.
        """
        async with self._lock:
            engine = self._engine
            try:
                await engine.load(directory, version)
            except EngineBroken as error:
                broken = error
            else:
                self._loaded = directory, version
                return
        await self._restart(engine, broken)
        raise Unavailable(f"the engine broke while it loaded version {version}, and was started again: {broken}")

    def submit(self, requests: Sequence[Request]) -> None:
        """See `Engine`."""
        new = [one for one in requests if one.handle not in self._requests or self._newer(one)]
        before = {one.handle: self._requests.get(one.handle) for one in new}
        for one in new:
            self._requests[one.handle], self._ids[one.handle] = one, np.asarray(one.prefix).tolist()
        if self._restarting:
            return  # it gets them when it has started
        try:
            self._engine.submit(new)
        except EngineBroken:
            return  # `spans` says so too, and starts it again with these
        except RlharvestError:
            for handle, request in before.items():
                self._forget(handle)
                if request is not None:
                    self._requests[handle], self._ids[handle] = request, np.asarray(request.prefix).tolist()
            raise

    def abort(self, handles: Sequence[tuple[int, int]]) -> None:
        """See `Engine`."""
        for handle, attempt in handles:
            if handle in self._requests and self._requests[handle].attempt == attempt:
                self._forget(handle)
        self._engine.abort(handles)

    async def spans(self) -> list[Span]:
        """See `Engine`."""
        while True:
            engine = self._engine
            try:
                spans = await engine.spans()
            except EngineBroken as error:
                if self._closed:
                    raise
                await self._restart(engine, error)
                continue
            # What an abort or a newer attempt made void must not be counted.
            kept = [span for span in spans if self._take(span)]
            if kept:
                return kept

    def pause(self) -> None:
        """See `Engine`."""
        self._paused = True
        self._engine.pause()

    def resume(self) -> None:
        """See `Engine`."""
        self._paused = False
        self._engine.resume()

    def stats(self) -> EngineStats:
        """Return the counters since the engine started last."""
        return self._engine.stats()

    async def close(self) -> None:
        """See `Engine`."""
        self._closed = True
        await self._engine.close()

    def _newer(self, request: Request) -> bool:
        return request.attempt > self._requests[request.handle].attempt

    def _forget(self, handle: int) -> None:
        self._requests.pop(handle, None)
        self._ids.pop(handle, None)

    def _take(self, span: Span) -> bool:
        request = self._requests.get(span.handle)
        if request is None or request.attempt != span.attempt:
            return False
        self._ids[span.handle].extend(span.ids.tolist())
        if span.finish is not Finish.NONE:
            self._forget(span.handle)
        return True

    async def _restart(self, broken: Engine, error: EngineBroken) -> None:
        async with self._lock:
            if self._engine is not broken:
                return  # another call found it first
            now = self._clock()
            if self._config is None or (len(self._restarts) == MOST and now - self._restarts[0] < WITHIN_S):
                raise error
            self._restarts.append(now)
            log.warning("engine.restarts", error=str(error), responses=len(self._requests))
            self._restarting = True
            try:
                await broken.close()
                engine = self._make()
                self._engine = engine
                await engine.start(self._config)
                if self._loaded is not None:
                    await engine.load(*self._loaded)
            except RlharvestError as failure:
                raise EngineBroken(f"the engine died ({error}) and does not start again: {failure}") from failure
            finally:
                self._restarting = False
            if self._paused:
                engine.pause()
            self._continue(engine)

    def _continue(self, engine: Engine) -> None:
        for handle, request in list(self._requests.items()):
            prefix = np.asarray(self._ids[handle], dtype=np.uint32)
            try:
                engine.submit([replace(request, prefix=prefix)])
            except InvalidField as error:  # it came while the engine was away, and was not looked at before
                log.warning("response.refused", handle=handle, error=str(error))
                self._forget(handle)
