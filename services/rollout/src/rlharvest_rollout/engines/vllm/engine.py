"""The vLLM engine: `rlharvest.engine.Engine` on vLLM's `AsyncLLM`.

One vLLM request for each response; token ids in and out. Everything that changes the engine goes through one lock in the
order it was asked for. A version is switched with the requests kept: pause, reload, salt the prefix cache anew, resume.
vLLM's core labels each output with the version that its weights have when it is computed, and changes the label only
while nothing runs, so the version of a token is exact however late its output arrives here.

What it does not promise: a continuation is exactly distributed but not bit-equal to the response that stayed. Sums depend
on the batch, and draws come from the engine's own generator, which is seeded anew at each start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog
from rlharvest.engine import EngineBroken, EngineConfig, EngineStats, Request
from rlharvest.errors import Conflict, DataError
from rlharvest.spans import Finish, Span

from rlharvest_rollout.engines.outbox import Outbox
from rlharvest_rollout.engines.stops import StopText, StopTexts
from rlharvest_rollout.engines.vllm.arguments import Machine, drafts, numerics_key
from rlharvest_rollout.engines.vllm.process import EngineProcess, release, this_machine
from rlharvest_rollout.engines.vllm.requests import (
    NotFinite,
    Response,
    check_fits,
    sampled_logprobs,
    sampling_parameters,
    version_runs,
)
from rlharvest_rollout.engines.vllm.selftest import HEAD_ERROR, SelfTest
from rlharvest_rollout.engines.vllm.weights import Layout, read_layout

log = structlog.get_logger(__name__)


class VllmEngine:
    """An engine of vLLM, on GPUs or on a CPU."""

    def __init__(
        self,
        *,
        threads: int = 1,
        slots: int = 64,
        kv_memory_bytes: int = 1 << 30,
        tensor_parallel: int = 1,
        gpu_memory: float = 0.9,
        draft_memory_bytes: int = 1 << 28,
    ) -> None:
        """Set up without starting anything.

        Args:
            threads: compute threads of the engine process, on a CPU.
            slots: most sequences that run at a time, whatever a job asks for.
            kv_memory_bytes: memory for keys and values, on a CPU.
            tensor_parallel: GPUs that one model is split over.
            gpu_memory: share of each GPU's memory that the engine takes.
            draft_memory_bytes: bound of the memory for what drafts are made of.
        """
        self._machine: Machine = this_machine(
            threads=threads,
            slots=slots,
            kv_memory_bytes=kv_memory_bytes,
            tensor_parallel=tensor_parallel,
            gpu_memory=gpu_memory,
        )
        self._draft_memory_bytes = draft_memory_bytes
        self._config = EngineConfig(slots=slots, context=1, options={})
        self._news = asyncio.Event()
        self._outbox = Outbox(self._news.set)
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._responses: dict[tuple[int, int], Response] = {}
        self._process: EngineProcess | None = None
        self._directory: Path | None = None
        self._layout: Layout | None = None
        self._vocab = 0
        self._stop_texts = StopTexts()
        self._stop_text: StopText | None = None
        self._version: int | None = None
        self._paused = self._held = self._asleep = False
        """Asked to generate nothing; generating nothing; weights off the device."""
        self._generated = self._prefilled = self._saved = 0
        self._drafts = self._drafted = self._accepted = 0
        self._closed = False

    @property
    def version(self) -> int | None:
        """Version that samples now."""
        return self._version

    @property
    def numerics_key(self) -> str:
        """Engine, release, unit, dtype, parallelism."""
        return numerics_key(self._config, self._machine, release=release())

    @property
    def batch_invariant(self) -> bool:
        """Never: see the module."""
        return False

    async def start(self, config: EngineConfig) -> None:
        """Get ready for a job: no version, no request; vLLM itself starts with the first version."""
        if self._closed:
            raise EngineBroken("the engine is closed")
        async with self._lock:
            await self._end()
            self._outbox.forget_all()
            self._config, self._paused = config, False
            self._generated = self._prefilled = self._saved = 0
            self._drafts = self._drafted = self._accepted = 0
        if config.batch_invariant:
            log.warning("engine.not_invariant", numerics=self.numerics_key)

    async def load(self, directory: Path, version: int) -> None:
        """Switch to the weights in a directory, the requests kept; see `Engine.load`."""
        if self._version == version:
            return
        # While the old version goes on: afterwards the bytes are in memory.
        layout = await asyncio.to_thread(read_layout, directory)
        stop_text = await asyncio.to_thread(self._stop_texts.read, directory / "tokenizer.json")
        async with self._lock:
            self._check()
            if self._process is None:
                await self._first(directory, version, layout)
            else:
                assert self._layout is not None
                self._layout.check_same(layout, directory)
                await self._switch(self._process, directory, version)
            self._directory, self._stop_text = directory, stop_text

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests.

        Raises:
            Conflict: no version is loaded.
            InvalidField: a request does not fit the job's context or the model; none of them is taken.
        """
        self._check()
        if self._version is None:
            raise Conflict("the engine has loaded no version yet")
        text, drafting = self._stop_text, drafts(self._config, self._machine)
        responses = []
        for request in requests:
            check_fits(request, context=self._config.context, vocab=self._vocab, stop_text=text, drafts=drafting)
            response = Response.of(request, text)
            if response.finish is Finish.NONE:
                response.parameters = sampling_parameters(response, vocab=self._vocab, drafts=drafting)
            responses.append(response)
        for response in responses:
            handle, attempt = response.key
            if self._outbox.want(handle, attempt):
                self._drop({key for key in self._responses if key[0] == handle})
                if response.finish is not Finish.NONE:
                    self._outbox.put([response.ended()], self._version)
                    continue
                self._responses[response.key] = response
                self._ordered(self._begin(response))

    def abort(self, handles: Sequence[tuple[int, int]]) -> None:
        """Forget these (handle, attempt) pairs."""
        self._outbox.forget(handles)
        self._drop(set(handles))

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
        self._ordered(self._settle())

    def resume(self) -> None:
        """Go on."""
        self._paused = False
        self._ordered(self._settle())

    async def sleep(self) -> None:
        """Give the device to somebody else: weights to the host's memory, keys and values dropped, requests kept.

        For a worker that shares the trainer's device. On a CPU there is nothing to give, and only generation stops.
        """
        async with self._lock:
            process = self._serving()
            if not self._asleep:
                self._asleep = True
                await self._hold(process)
                await process.drop_cache()
                await process.llm.sleep(level=1, mode="keep")

    async def wake(self) -> None:
        """Take the device back and go on with the requests, their tokens prefilled again."""
        async with self._lock:
            process = self._serving()
            if self._asleep:
                await process.llm.wake_up()
                self._asleep = False
                await self._release(process)

    def stats(self) -> EngineStats:
        """Return the counters of this job."""
        slots = min(self._machine.slots, self._config.slots)
        alive = len(self._responses)
        return EngineStats(
            running=min(alive, slots),
            waiting=max(0, alive - slots),
            generated_tokens=self._generated,
            prefill_tokens=self._prefilled,
            prefill_saved_tokens=self._saved,
            drafts=self._drafts,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
        )

    async def close(self) -> None:
        """End vLLM and every process of it."""
        self._closed = True
        self._outbox.fail(EngineBroken("the engine is closed"))
        async with self._lock:
            await self._end()

    # --- versions ---

    async def _first(self, directory: Path, version: int, layout: Layout) -> None:
        process = await EngineProcess.start(self._config, self._machine, directory)
        try:
            self._vocab = int(process.llm.model_config.get_vocab_size())
            test = SelfTest(
                process, directory, vocab=self._vocab, dtype=self._config.dtype, context=self._config.context
            )
            took = await test.run()
            if drafts(self._config, self._machine):
                took += await test.run_drafts()
                await process.call("guard_drafts", asdict(self._config.speculation), self._draft_memory_bytes)
            await process.llm.update_weight_version(str(version))
        except BaseException:
            await process.close()
            raise
        self._process, self._layout, self._version = process, layout, version
        self._held = self._asleep = False
        self._spawn(process.watch())
        log.info("engine.started", vllm=release(), numerics=self.numerics_key, self_test_s=round(took, 2))
        if self._paused:
            await self._hold(process)

    async def _switch(self, process: EngineProcess, directory: Path, version: int) -> None:
        assert self._directory is not None
        await self._hold(process)
        try:
            try:
                await self._reload(process, directory)
            except EngineBroken:
                raise
            except Exception as error:
                await self._reload(process, self._directory)
                raise DataError(f"vLLM could not load version {version} ({error}); the one before is back") from error
            await process.llm.update_weight_version(str(version))
            if self._config.kv == "recompute":
                await process.drop_cache()
            self._version = version
        except DataError:
            raise
        except Exception as error:
            broken = error if isinstance(error, EngineBroken) else EngineBroken(f"half a version is loaded: {error!r}")
            self._break(broken)
            raise broken from error
        finally:
            if self._outbox.failure is None:
                await self._release(process)

    async def _reload(self, process: EngineProcess, directory: Path) -> None:
        stale = max(await process.call("guard_reload", str(directory)))
        if stale > HEAD_ERROR[self._config.dtype]:
            raise EngineBroken(
                f"the head's packed copy is {stale:.2g} off its weights after a reload (vLLM {release()})"
            )

    async def _hold(self, process: EngineProcess) -> None:
        """Generate nothing, and keep what runs."""
        if not self._held:
            await process.llm.pause_generation(mode="keep", clear_cache=False)
            self._held = True

    async def _release(self, process: EngineProcess) -> None:
        if self._held and not self._paused and not self._asleep:
            await process.llm.resume_generation()
            self._held = False

    async def _settle(self) -> None:
        if (process := self._process) is not None:
            if self._paused:
                await self._hold(process)
            else:
                await self._release(process)

    # --- responses ---

    async def _begin(self, response: Response) -> None:
        process = self._process
        if process is None or self._responses.get(response.key) is not response:
            return
        from vllm.inputs import tokens_input

        prompt = response.prompt()
        collector = await process.llm.add_request(
            response.name, tokens_input(prompt, cache_salt=f"version {self._version}"), response.parameters
        )
        response.internal = collector.request_id
        labels = process.llm.output_processor.request_states[collector.request_id].weight_version_starts
        self._spawn(self._follow(process, response, collector, labels, len(prompt)))

    async def _follow(
        self, process: EngineProcess, response: Response, collector: Any, labels: list[tuple[str, int]], prompt: int
    ) -> None:
        """Take a request's outputs until it ends; `labels` are (version, first token of it), as vLLM extends them."""
        taken = 0
        while response.finish is Finish.NONE and response.key in self._responses:
            output = collector.get_nowait() or await collector.get()
            completion = output.outputs[0]
            if taken == 0:
                self._saved += output.num_cached_tokens or 0
                self._prefilled += prompt - (output.num_cached_tokens or 0)
            logprobs = sampled_logprobs(completion)
            tokens = response.take(completion.token_ids, logprobs)
            self._generated += len(tokens)
            for start, end, version in version_runs(labels, taken, taken + len(tokens)):
                self._outbox.put(tokens[start - taken : end - taken], version)
            taken += len(tokens)
            if (counts := completion.spec_decode_metrics) is not None:  # with the last output
                self._drafts += sum(counts.histogram)
                self._drafted += counts.num_draft_tokens
                self._accepted += sum(accepted * steps for accepted, steps in enumerate(counts.histogram))
            if output.finished and response.finish is Finish.NONE:
                if self._responses.get(response.key) is not response:
                    return
                raise EngineBroken(f"vLLM ended a response after {taken} tokens: {completion.finish_reason}")
            if response.finish is not Finish.NONE:
                self._responses.pop(response.key, None)
                if not output.finished:
                    await process.llm.abort(response.internal, internal=True)

    def _drop(self, keys: set[tuple[int, int]]) -> None:
        """Let vLLM forget responses."""
        gone = [response for key in keys if (response := self._responses.pop(key, None)) is not None]
        if gone:
            self._ordered(self._abort(gone))

    async def _abort(self, gone: list[Response]) -> None:
        names = [response.internal for response in gone if response.internal is not None]
        if self._process is not None and names:
            await self._process.llm.abort(names, internal=True)

    # --- the process ---

    def _ordered(self, action: Coroutine[Any, Any, None]) -> None:
        """Do something to vLLM after all that was asked for before."""

        async def in_turn() -> None:
            async with self._lock:
                await action

        self._spawn(in_turn())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._process is not None:
            what = "NotFinite: " if isinstance(error, NotFinite) else ""
            broken = error if isinstance(error, EngineBroken) else EngineBroken(f"the engine died: {what}{error!r}")
            # Its frames would hold on to the dead process for as long as this engine is known.
            self._break(broken.with_traceback(None))

    def _break(self, error: EngineBroken) -> None:
        if self._outbox.failure is None:
            log.error("engine.broken", error=str(error))
            self._outbox.fail(error)

    def _check(self) -> None:
        if self._outbox.failure is not None:
            raise self._outbox.failure

    def _serving(self) -> EngineProcess:
        self._check()
        if self._process is None:
            raise Conflict("the engine has loaded no version yet")
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        self._version = self._layout = self._directory = None
        self._responses.clear()
        me = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not me]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if process is not None:
            await process.close()
