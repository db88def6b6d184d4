"""A coordinator as a trainer sees it: the Batches service over real gRPC, following a script.

Batches come from a function of the step, so the same step always gives the same batch, as NextBatch promises. Tests
turn `directive`, `epoch`, `fence` and `visible`, and read what the trainer reported.
"""

from __future__ import annotations

import asyncio
import math
import random
import struct
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from rlharvest import rpc
from rlharvest.jobs.model import JobSpec
from rlharvest.spans import Finish, ids_bytes
from rlharvest.v1 import batches_pb2, batches_pb2_grpc

SERVICE = "rlharvest.v1.Batches"

Batch = Callable[[int], Sequence[batches_pb2.BatchGroup]]


TOKENIZER_DIGEST = "0123abcd"
"""What ScriptedCoordinator says that its job was tokenised with."""


class ScriptedCoordinator(batches_pb2_grpc.BatchesServicer):
    """Gives one job to whoever claims it, until it is finished.

    Args:
        batch: the groups of each step, in order of admission; positions are given here.
        order: positions of a step's groups in the order in which they are delivered; unset: as admitted.
    """

    def __init__(
        self,
        job: str,
        spec: JobSpec,
        checkpoint_dir: Path,
        batch: Batch,
        *,
        order: Callable[[int, int], Sequence[int]] | None = None,
        renew_s: float = 0.05,
    ) -> None:
        self.job = job
        self.spec = spec
        self.checkpoint_dir = checkpoint_dir
        self.batch = batch
        self.order = order
        self.renew_s = renew_s
        self.fence = 0
        self.epoch = 1
        self.directive = batches_pb2.DIRECTIVE_CONTINUE
        self.next_version = 0
        """What a claim is told to number versions from."""
        self.lost_version: int | None = None
        """What renewals are told that the weight service lost."""
        self.visible: dict[int, int] = {}
        """Groups of a step that are committed by now; a step that is not named has all."""
        self.claims: list[str] = []
        self.renewals: list[batches_pb2.RenewRequest] = []
        self.asked: list[tuple[int, int, int]] = []
        """(fence, step, after) of each NextBatch."""
        self.steps: dict[int, list[batches_pb2.ReportStepRequest]] = defaultdict(list)
        self.checkpoints: list[batches_pb2.ReportCheckpointRequest] = []
        self.outcomes: list[tuple[int, str]] = []
        """(outcome, error) of each Finish."""
        self.open = True
        """Whether the job can be claimed."""
        self._server = rpc.Server()

    async def start(self, address: str = "127.0.0.1:0") -> str:
        """Listen; return the address."""
        self._server.add(SERVICE, batches_pb2_grpc.add_BatchesServicer_to_server, self)
        await self._server.start(address)
        return f"127.0.0.1:{self._server.port}"

    async def close(self) -> None:
        await self._server.close(0.0)

    async def until(self, what: Callable[[ScriptedCoordinator], bool], *, timeout_s: float = 30.0) -> None:
        """Wait until something holds of this coordinator; raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not what(self):  # noqa: ASYNC110 - any condition at all, so there is no event to wait for
                await asyncio.sleep(0.01)

    def digests(self) -> dict[int, str]:
        """Return the digest of each step as it was last reported."""
        return {step: reports[-1].digest for step, reports in sorted(self.steps.items())}

    async def Claim(self, request: batches_pb2.ClaimRequest, context: Any) -> batches_pb2.ClaimReply:
        if not self.open:
            await asyncio.sleep(min(request.wait_s, 0.2))
            return batches_pb2.ClaimReply()
        self.open = False
        self.fence += 1
        self.claims.append(request.trainer)
        return batches_pb2.ClaimReply(
            claimed=batches_pb2.Claimed(
                job=self.job,
                fence=self.fence,
                job_json=self.spec.model_dump_json(),
                checkpoint_dir=str(self.checkpoint_dir),
                renew_s=self.renew_s,
                deadline_s=10.0,
                tokenizer_digest=TOKENIZER_DIGEST,
                next_version=self.next_version,
            )
        )

    async def Renew(self, request: batches_pb2.RenewRequest, context: Any) -> batches_pb2.RenewReply:
        await self._check(request.fence, context)
        self.renewals.append(request)
        return batches_pb2.RenewReply(directive=self.directive, lost_version=self.lost_version)

    async def NextBatch(self, request: batches_pb2.NextBatchRequest, context: Any) -> batches_pb2.NextBatchReply:
        await self._check(request.fence, context)
        self.asked.append((request.fence, request.step, request.after))
        groups = list(self.batch(request.step))
        if self.order is not None:
            groups = [groups[at] for at in self.order(request.step, len(groups))]
        size = len(groups)
        for position, group in enumerate(groups):
            group.position = position
        there = min(size, self.visible.get(request.step, size))
        return batches_pb2.NextBatchReply(
            step=request.step,
            epoch=self.epoch,
            size=size,
            groups=groups[request.after : there],
            complete=there == size,
        )

    async def ReportStep(self, request: batches_pb2.ReportStepRequest, context: Any) -> batches_pb2.ReportStepReply:
        await self._check(request.fence, context)
        self.steps[request.step].append(request)
        return batches_pb2.ReportStepReply(directive=self.directive)

    async def ReportCheckpoint(
        self, request: batches_pb2.ReportCheckpointRequest, context: Any
    ) -> batches_pb2.ReportCheckpointReply:
        await self._check(request.fence, context)
        self.checkpoints.append(request)
        return batches_pb2.ReportCheckpointReply()

    async def Finish(self, request: batches_pb2.FinishRequest, context: Any) -> batches_pb2.FinishReply:
        await self._check(request.fence, context)
        self.outcomes.append((request.outcome, request.error))
        return batches_pb2.FinishReply()

    async def _check(self, fence: int, context: Any) -> None:
        if fence < self.fence:
            abort: Callable[..., Awaitable[None]] = context.abort
            await abort(grpc.StatusCode.ABORTED, f"fence {fence} is below {self.fence}")


def random_group(
    seed: int,
    *,
    group: int,
    n: int,
    vocab: int,
    prompt: int = 4,
    lengths: tuple[int, int] = (2, 8),
    version: int = 0,
) -> batches_pb2.BatchGroup:
    """Return a group of random tokens whose log-probabilities are those of a uniform policy; a function of its
    arguments.

    The reward of a response is the fraction of its tokens that are even.
    """
    source = random.Random(f"{seed}:{group}")
    logprob = -math.log(vocab)
    samples = []
    for place in range(n):
        ids = [source.randrange(vocab) for _ in range(source.randint(*lengths))]
        samples.append(
            batches_pb2.BatchSample(
                handle=group * n + place,
                response_id=f"resp_test_{group * n + place}",
                ids=ids_bytes(ids),
                logprobs=struct.pack(f"<{len(ids)}f", *[logprob] * len(ids)),
                run_n=[len(ids)],
                run_version=[version],
                reward=sum(token % 2 == 0 for token in ids) / len(ids),
                finish=Finish.LENGTH.value if len(ids) == lengths[1] else Finish.EOS.value,
            )
        )
    return batches_pb2.BatchGroup(
        group=group,
        prompt=group,
        prompt_ids=ids_bytes([source.randrange(vocab) for _ in range(prompt)]),
        samples=samples,
    )
