"""From a score request to its result: every function of the job in a process of its own, then one weighted sum.

Invariants: a result carries either a finite reward or an error, never a silent zero; the same request gives the same
result (unless the functions themselves are random); nothing of a request reaches this process's interpreter as code.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import structlog
from pydantic import TypeAdapter, ValidationError
from rlharvest.jobs.model import Reward
from rlharvest.v1 import scores_pb2

from rlharvest_reward import metrics
from rlharvest_reward.fault import RewardFault, sample_json, shorten
from rlharvest_reward.pool import Pool
from rlharvest_reward.process import RewardProcess
from rlharvest_reward.roots import confined
from rlharvest_reward.settings import RewardSettings

log = structlog.get_logger(__name__)

Outcome = float | RewardFault | OSError | None
"""What came of one function for one sample."""

_REWARDS = TypeAdapter(list[Reward])


class Key(NamedTuple):
    """Which function a process has loaded, and for whom: no process serves two jobs, whatever they have in common.

    Another digest means another file or another configuration.
    """

    job: str
    digest: str
    place: int
    reward_json: str


def name_of(reward: Reward) -> str:
    """Return the name of a reward's component."""
    return reward.builtin or reward.name


def combine(rewards: Sequence[Reward], scores: Sequence[float | None]) -> float:
    """Return the weighted sum of the functions that said something.

    Raises:
        RewardFault: `none` if no function did; `not_finite` if the sum overflows.
    """
    said = [reward.weight * score for reward, score in zip(rewards, scores, strict=True) if score is not None]
    names = ", ".join(name_of(reward) for reward in rewards)
    if not said:
        raise RewardFault(
            "none",
            f"{names} returned None for this sample; expected a number from at least one function",
            function=names,
        )
    total = sum(said)
    if not math.isfinite(total):
        raise RewardFault("not_finite", f"the weighted sum of {names} is not finite. Lower the weights", function=names)
    return total


def sample_of(request: scores_pb2.ScoreRequest) -> dict[str, Any]:
    """Return the sample of a request as the child processes take it.

    Raises:
        RewardFault: its JSON or its ids cannot be read.
    """
    try:
        return {
            "prompt": _json(request.prompt_json) if request.prompt_json else request.prompt_text,
            "prompt_text": request.prompt_text,
            "completion": request.completion,
            "completion_ids": np.frombuffer(request.completion_ids, dtype="<u4").tolist(),
            "columns": dict(_json(request.columns_json or "{}")),
            "truncated": request.truncated,
            "step": request.step,
        }
    except (ValueError, TypeError, RecursionError) as error:
        raise RewardFault("wrong_type", f"the score request cannot be read: {error}", function="request") from error


def _json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def rewards_of(request: scores_pb2.ScoreRequest) -> list[Reward]:
    """Return the rewards block of a request; raise RewardFault if it is none."""
    try:
        rewards = _REWARDS.validate_json(request.rewards_json)
    except ValidationError as error:
        raise RewardFault("wrong_type", f"the rewards block cannot be read: {error}", function="rewards") from error
    if not rewards:
        raise RewardFault("not_found", "the rewards block is empty. Name at least one function", function="rewards")
    return rewards


class Scorer:
    """Scores requests with at most `settings.processes` processes."""

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        self.pool: Pool[Key, RewardProcess] = Pool(self._start, size=settings.processes, idle_s=settings.idle_s)

    async def score(self, request: scores_pb2.ScoreRequest) -> scores_pb2.ScoreResult:
        """Return the result of a request; faults of its functions are in it.

        Raises:
            OSError: this machine could not start a process (memory, descriptors); the request may be tried again.
        """
        began = time.monotonic()
        result = scores_pb2.ScoreResult(
            job=request.job, handle=request.handle, attempt=request.attempt, reward_digest=request.reward_digest
        )
        sample: dict[str, Any] | None = None
        try:
            sample = sample_of(request)
            rewards = rewards_of(request)
            outcomes = await self._all(request, rewards, sample)
            for reward, outcome in zip(rewards, outcomes, strict=True):
                if not isinstance(outcome, Exception):
                    result.components.add(name=shorten(name_of(reward), 200), value=outcome, weight=reward.weight)
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
            scores = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
            result.reward = combine(rewards, scores)
        except RewardFault as fault:
            self._report(request, result, fault, sample)
        result.seconds = time.monotonic() - began
        return result

    async def _all(
        self, request: scores_pb2.ScoreRequest, rewards: Sequence[Reward], sample: dict[str, Any]
    ) -> list[Outcome]:
        async def one(index: int, reward: Reward) -> Outcome:
            try:
                key = Key(request.job, request.reward_digest, index, reward.model_dump_json())
                return await self._one(key, reward, sample)
            except (RewardFault, OSError) as fault:
                return fault

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index, reward)) for index, reward in enumerate(rewards)]
        return [task.result() for task in tasks]

    async def _one(self, key: Key, reward: Reward, sample: dict[str, Any]) -> float | None:
        async with self.pool.process(key) as process:
            printed = process.output_total
            try:
                return await process.score(sample, reward.timeout_s)
            finally:
                self._gauge()
                if process.output_total != printed:
                    log.debug("reward.output", function=process.label, bytes=process.output_total - printed)

    async def _start(self, key: Key) -> RewardProcess:
        reward = Reward.model_validate_json(key.reward_json)
        spec = reward.model_dump(mode="json")
        if reward.path is not None:
            spec["path"] = str(confined(reward.path, self._settings.roots))
        sandbox, load_timeout_s = self._settings.sandbox, self._settings.load_timeout_s
        process = await RewardProcess.start(spec, sandbox=sandbox, load_timeout_s=load_timeout_s)
        metrics.STARTED.inc()
        log.info("reward.process", function=process.label, pid=process.pid)
        return process

    def _report(
        self,
        request: scores_pb2.ScoreRequest,
        result: scores_pb2.ScoreResult,
        fault: RewardFault,
        sample: dict[str, Any] | None,
    ) -> None:
        metrics.FAULTS.labels(fault.kind).inc()
        log.warning(
            "reward.fault",
            job=request.job,
            handle=request.handle,
            kind=fault.kind,
            function=fault.function,
            message=str(fault),
        )
        result.error.function = shorten(fault.function, 200)
        result.error.kind = fault.kind
        result.error.message = str(fault)
        result.error.sample = "{}" if sample is None else sample_json(sample)

    def _gauge(self) -> None:
        metrics.PROCESSES.labels("busy").set(self.pool.busy)
        metrics.PROCESSES.labels("idle").set(self.pool.idle)

    async def reap(self) -> None:
        """Close processes that are idle for long, for ever."""
        while True:
            await asyncio.sleep(min(self._settings.idle_s / 2, 30.0))
            closed = await self.pool.reap()
            self._gauge()
            if closed:
                log.info("reward.idle", closed=closed)

    async def close(self) -> None:
        await self.pool.close()
