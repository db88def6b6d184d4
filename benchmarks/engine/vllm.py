"""vLLM, bare or as our worker's engine, in a process of the environment that has it.

    python -m benchmarks.engine.vllm MODEL THREADS bare|worker

Speaks JSON, a line of work in, a line of what was made out. Both have the same settings: eager, without drafts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from benchmarks.engine.ours import CONTEXT, SLOTS, EngineLane
from benchmarks.engine.work import Made, Work

ROOT = Path(__file__).parents[2]
KV_BYTES = 1 << 29
LINE_BYTES = 1 << 24
_START_S, _ANSWER_S = 240, 120


class Lane(Protocol):
    """Something that generates."""

    async def generate(self, work: Work) -> Made: ...

    async def close(self) -> None: ...


class Child:
    """The process, seen from the bench. Use it as an asynchronous context manager."""

    def __init__(self, python: Path, model: Path, threads: int, kind: str) -> None:
        self._command = [str(python), "-m", "benchmarks.engine.vllm", str(model), str(threads), kind]
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Child:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=LINE_BYTES,
        )
        try:
            await self._line(_START_S)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def generate(self, work: Work) -> Made:
        """Let it generate all of it; the seconds are its own, on the wall."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(work)).encode() + b"\n")
        answer = json.loads(await self._line(_ANSWER_S))
        return Made(
            tokens=answer["tokens"],
            seconds=answer["seconds"],
            ids=tuple(map(tuple, answer["ids"])),
            logprobs=tuple(map(tuple, answer["logprobs"])),
        )

    async def __aexit__(self, *exc: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 20)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _line(self, seconds: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), seconds)
        if not line:
            raise RuntimeError(f"vLLM's process ended with {await self._process.wait()}: {' '.join(self._command)}")
        return line


class Bare:
    """vLLM's own AsyncLLM with the arguments that our engine gives it, but for our guards."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._requests = 0

    @classmethod
    async def open(cls, model: Path, threads: int) -> Bare:
        """Start it."""
        from rlharvest.engine import EngineConfig
        from rlharvest.speculation.options import Speculation
        from rlharvest_rollout.engines.vllm.arguments import engine_arguments, environment
        from rlharvest_rollout.engines.vllm.process import this_machine

        machine = this_machine(threads=threads, slots=SLOTS, kv_memory_bytes=KV_BYTES)
        config = EngineConfig(
            slots=SLOTS, context=CONTEXT, dtype="bfloat16", speculation=Speculation(enabled="off"), options={}
        )
        os.environ.update(environment(machine))
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_arguments(config, machine, model, seed=0)
        del arguments["worker_extension_cls"]
        return cls(await asyncio.to_thread(AsyncLLM.from_engine_args, AsyncEngineArgs(**arguments)))

    async def generate(self, work: Work) -> Made:
        """Generate all of it."""
        started = time.perf_counter()
        made = await asyncio.gather(*(self._one(work, index) for index in range(len(work.lengths))))
        seconds = time.perf_counter() - started
        ids, logprobs = (tuple(part) for part in zip(*made, strict=True))
        return Made(tokens=sum(map(len, ids)), seconds=seconds, ids=ids, logprobs=logprobs)

    async def close(self) -> None:
        """Stop it."""
        await asyncio.to_thread(self._llm.shutdown)

    async def _one(self, work: Work, index: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._requests += 1
        params = SamplingParams(
            temperature=work.temperature,
            max_tokens=work.lengths[index],
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
        )
        ids: list[int] = []
        logprobs: list[float] = []
        prompt = {"prompt_token_ids": list(work.prompts[index])}
        async for output in self._llm.generate(prompt, params, str(self._requests)):
            part = output.outputs[0]
            ids += part.token_ids
            logprobs += [found[token].logprob for token, found in zip(part.token_ids, part.logprobs, strict=True)]
        return tuple(ids), tuple(logprobs)


async def _open(model: Path, threads: int, kind: str) -> Lane:
    if kind == "bare":
        return await Bare.open(model, threads)
    from rlharvest_rollout.engines.vllm.engine import VllmEngine

    return await EngineLane(VllmEngine(threads=threads, slots=SLOTS, kv_memory_bytes=KV_BYTES)).open(model)


async def _serve(model: Path, threads: int, kind: str, answers: int) -> None:
    lane = await _open(model, threads, kind)
    try:
        os.write(answers, b"{}\n")
        while line := await asyncio.to_thread(sys.stdin.readline):
            made = await lane.generate(Work(**json.loads(line)))
            data = memoryview(json.dumps(dataclasses.asdict(made)).encode() + b"\n")
            while data:
                data = data[os.write(answers, data) :]
    finally:
        await lane.close()


if __name__ == "__main__":
    # What vLLM prints must not be taken for an answer.
    answers = os.dup(1)
    os.dup2(2, 1)
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], answers))
