"""gRPC: every method of every service gets what it should not, and has to say so with a status that helps.

Calls that would be right (a claim by the trainer that has the job, a deletion of the job that runs) are left out: they would
do what they say. What remains must change nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from rlharvest.access import JOINING, METHODS, Role
from rlharvest.grants import grant
from rlharvest.rpc import MAX_MESSAGE_BYTES
from rlharvest.testing.system import System
from rlharvest.v1 import batches_pb2, fleet_pb2, jobs_pb2, weights_pb2

from benchmarks.fuzz.messages import Known, broken, drawn, garbage, messages
from benchmarks.fuzz.still import UNKNOWN

ANSWERS = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Statuses with which a server may answer what it should not have been asked."""

WAITS = ("Claim", "NextBatch", "Watch")
"""Methods that may still wait when the caller's deadline comes."""

STRANGER = "wkr_fuzz"
"""A worker with a credential of its own that holds nothing."""

DEADLINE_S = 20.0
WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Method:
    """A method at an address."""

    address: str
    path: str
    name: str
    request: type[Message]
    requests_stream: bool = False
    answers_stream: bool = False


@dataclass(slots=True)
class Outcome:
    """What the servers said."""

    calls: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """Calls that were not answered as they should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What runs: true names, of which the calls make wrong ones."""

    job: str
    over: str
    """A job that has ended."""
    worker: str
    incarnation: int
    fence: int
    trainer: str = "trainer-0"

    @property
    def known(self) -> Known:
        """Values that mean something, by field."""
        ids = [self.job, self.over, UNKNOWN]
        return {
            "job": ids,
            "id": ids,
            "after": [self.over, UNKNOWN],
            "worker": [self.worker, STRANGER],
            "incarnation": [self.incarnation, self.incarnation - 1, self.incarnation + 1],
            "fence": [self.fence, self.fence - 1, self.fence + 1],
            "trainer": ["trainer-9"],
            "attempt": [1, 1 << 32 | 1, 2 << 32 | 1, 2**64 - 1],
            "handle": [0, 1, 2, 2**32 - 1],
            "wait_s": [0.0, -1.0, float("nan"), float("inf")],
            "step": [0, 1, 2**31],
            "service": ["", "rlharvest.v1.Fleet"],
            "manifest_json": ["{}", "[", '{"job": 1}', "[" * 50_000, '{"job":"' + self.over + '","step":0,"files":[]}'],
            "spec_json": ["{}", "[" * 50_000, "NaN", '{"model": 1}', '"\\ud800"'],
            "digest": ["0" * 64],
        }


def methods(system: System) -> list[Method]:
    """Return every method of every server."""
    coordinator, weights = f"127.0.0.1:{system.grpc_port}", f"127.0.0.1:{system.weights_port}"
    services: list[tuple[str, ServiceDescriptor]] = [
        (coordinator, fleet_pb2.DESCRIPTOR.services_by_name["Fleet"]),
        (coordinator, batches_pb2.DESCRIPTOR.services_by_name["Batches"]),
        (coordinator, jobs_pb2.DESCRIPTOR.services_by_name["Jobs"]),
        (weights, weights_pb2.DESCRIPTOR.services_by_name["Weights"]),
    ]
    for address in (coordinator, weights):
        services.append((address, health_pb2.DESCRIPTOR.services_by_name["Health"]))
        services.append((address, reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]))
    return [_method(address, service, method) for address, service in services for method in service.methods]


def _method(address: str, service: ServiceDescriptor, method: MethodDescriptor) -> Method:
    return Method(
        address,
        f"/{service.full_name}/{method.name}",
        method.name,
        GetMessageClass(method.input_type),
        requests_stream=method.client_streaming,
        answers_stream=method.server_streaming,
    )


def acts(method: Method, data: bytes, target: Target) -> bool:
    """Whether a call would rightly do what it says, because it comes with all that gives the right to it."""
    try:
        request: Any = method.request.FromString(data)
    except Exception:  # noqa: BLE001 - then it is no call at all
        return False
    match method.name:
        case "Cancel" | "Pause" | "Resume":
            return bool(request.id == target.job)
        case "Register" | "Leave":
            return bool(request.worker == target.worker)
        case "Claim":
            return bool(request.trainer == target.trainer)
        case "Renew" | "NextBatch" | "ReportStep" | "ReportCheckpoint" | "Finish":
            return bool((request.job, request.fence) == (target.job, target.fence))
        case "Retain" | "Forget":
            return bool(request.job in (target.job, target.over))
        case _:
            return False


def reported(target: Target) -> list[tuple[str, Message]]:
    """Return calls with the right job and claim whose contents nobody can mean: each must be INVALID_ARGUMENT."""
    who: dict[str, Any] = {"job": target.job, "fence": target.fence}
    return [
        ("NextBatch", batches_pb2.NextBatchRequest(**who, step=2**32 - 1)),
        ("NextBatch", batches_pb2.NextBatchRequest(**who, after=2**32 - 1)),
        ("NextBatch", batches_pb2.NextBatchRequest(**who, wait_s=float("nan"))),
        ("ReportStep", batches_pb2.ReportStepRequest(**who, step=2**32 - 1)),
        ("ReportStep", batches_pb2.ReportStepRequest(**who, version=2**32 - 1)),
        ("ReportStep", batches_pb2.ReportStepRequest(**who, metrics={"a\0b": 1.0})),
        ("ReportStep", batches_pb2.ReportStepRequest(**who, digest="x" * 10_000)),
        ("ReportCheckpoint", batches_pb2.ReportCheckpointRequest(**who, step=2**31)),
        ("ReportCheckpoint", batches_pb2.ReportCheckpointRequest(**who, path="/etc")),
        ("ReportCheckpoint", batches_pb2.ReportCheckpointRequest(**who, path="a\0b")),
        ("Finish", batches_pb2.FinishRequest(**who, outcome=77)),  # type: ignore[arg-type]  # no outcome, on purpose
        ("Finish", batches_pb2.FinishRequest(**who)),
        ("Claim", batches_pb2.ClaimRequest(trainer="")),
        ("Claim", batches_pb2.ClaimRequest(trainer="a b")),
        ("Claim", batches_pb2.ClaimRequest(trainer="trainer-9", wait_s=float("nan"))),
        ("Admit", fleet_pb2.AdmitRequest(worker="")),
        ("Admit", fleet_pb2.AdmitRequest(worker="a.b")),
        ("Register", fleet_pb2.RegisterRequest(worker=STRANGER, pid=2**32 - 1)),
        ("Register", fleet_pb2.RegisterRequest(worker=STRANGER, slots=2**32 - 1)),
        ("Register", fleet_pb2.RegisterRequest(worker=STRANGER, hostname="\0")),
    ]


def cases(method: Method, target: Target, *, n: int, seed: int) -> list[bytes]:
    """Return what a method gets: `n` made-up messages, what becomes of them on the way, and garbage."""
    source = random.Random(f"{seed}:{method.path}")
    shaped = [message.SerializeToString() for message in drawn(messages(method.request, target.known), n, of=seed)]
    spoilt = [data for one in source.sample(shaped, min(len(shaped), n // 2)) for data in broken(one, source)]
    return [data for data in [*shaped, *spoilt, *garbage(source)] if not acts(method, data, target)]


class Caller:
    """Calls methods with bytes, and judges the answers.

    Args:
        known: whether each call shows a token that the method takes; without one, nothing of ours may let it in.
    """

    def __init__(self, system: System, *, known: bool = True) -> None:
        self.outcome = Outcome()
        self._known = known
        self._tokens: dict[Role, str] = {
            "api": system.keyring.token("api_token"),
            "service": system.keyring.token("service_token"),
            "worker": system.keyring.token("worker_token"),
        }
        account = system.keyring.account()
        self._worker = account.credential(STRANGER, grant("worker", STRANGER)).jwt
        self.methods = methods(system)
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Caller:
        for address in {method.address for method in self.methods}:
            options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
            self._channels[address] = grpc.aio.insecure_channel(address, options=options)
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def call(self, method: Method, data: bytes) -> tuple[grpc.StatusCode, str]:
        """Send bytes; return status and details."""
        channel = self._channels[method.address]
        timeout = WAIT_S if method.name in WAITS else DEADLINE_S
        metadata = self._shown(method)
        try:
            if method.requests_stream:
                both: Any = channel.stream_stream(method.path)
                async for _ in both(iter([data]), timeout=timeout, metadata=metadata):
                    pass
            elif method.answers_stream:
                answers: Any = channel.unary_stream(method.path)
                async for _ in answers(data, timeout=timeout, metadata=metadata):
                    break
            else:
                one: Any = channel.unary_unary(method.path)
                await one(data, timeout=timeout, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""

    def _shown(self, method: Method) -> tuple[tuple[str, str], ...]:
        roles = METHODS.get(method.path, frozenset())
        if not self._known or not roles:
            return ()
        itself = "/rlharvest.v1.Fleet/" in method.path and method.path != JOINING
        return (("authorization", f"Bearer {self._worker if itself else self._tokens[min(roles)]}"),)

    async def judge(self, method: Method, data: bytes, allowed: Iterable[grpc.StatusCode] = ANSWERS) -> None:
        """Call, and take a wrong answer down."""
        code, details = await self.call(method, data)
        self.outcome.calls += 1
        self.outcome.statuses[code.name] += 1
        if method.name in WAITS and code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return
        if code not in set(allowed):
            shown = f"{data[:200]!r} ({len(data)} bytes)"
            self.outcome.faults.append(f"{method.path} answered {code.name} ({details[:200]}) to {shown}")

    async def run(self, target: Target, *, n: int, seed: int, oversized: bool = False) -> None:
        """Send every method everything, several at a time."""
        gate = asyncio.Semaphore(8)

        async def one(method: Method, data: bytes) -> None:
            async with gate:
                strange = not self._known and method.path in METHODS
                await self.judge(method, data, [grpc.StatusCode.UNAUTHENTICATED] if strange else ANSWERS)

        if self._known:
            # First, while the claim that they come with is sure to be good.
            named = {method.name: method for method in self.methods}
            for name, request in reported(target):
                await self.judge(named[name], request.SerializeToString(), [grpc.StatusCode.INVALID_ARGUMENT])
        for method in self.methods:
            # Made here, not beforehand: what was made up by seed is not kept for all methods at once.
            await asyncio.gather(*(one(method, data) for data in cases(method, target, n=n, seed=seed)))
        if oversized:
            huge = b"\x0a" + bytes(MAX_MESSAGE_BYTES + 1)
            for method in self.methods:
                await self.judge(method, huge, [grpc.StatusCode.RESOURCE_EXHAUSTED])
