"""gRPC: whatever a call brings or meets, its answer is a status that tells the caller what to do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from rlharvest import rpc_faults
from rlharvest.errors import (
    Conflict,
    DiskFull,
    Fenced,
    InvalidField,
    LimitReached,
    NotFound,
    NotLeader,
    RlharvestError,
    Unavailable,
)
from rlharvest.rpc import NOT_LEADER, Server
from rlharvest.v1 import fleet_pb2, fleet_pb2_grpc

Code = grpc.StatusCode


class Broken(fleet_pb2_grpc.FleetServicer):
    """Raises what it is given."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls = 0

    async def Register(
        self, request: fleet_pb2.RegisterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.RegisterReply:
        self.calls += 1
        raise self.error


Ask = Callable[[Exception, str, bytes], Any]


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    """Call a method of a server that raises an error; return status, details, and how often it was reached."""
    servers = []

    async def call(error: Exception, path: str, data: bytes) -> tuple[Code, str, int]:
        named: list[tuple[str, Any]] = [(rpc_faults.ERROR_KEY, rpc_faults.DISK_FULL)]
        fleet = Broken(error)
        server = Server(lambda error: "try again" if isinstance(error, ZeroDivisionError) else None)
        server.add("rlharvest.v1.Fleet", fleet_pb2_grpc.add_FleetServicer_to_server, fleet)
        await server.start("127.0.0.1:0")
        servers.append(server)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            method: Any = channel.unary_unary(path)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(data, timeout=20)
        metadata = [tuple(pair) for pair in caught.value.trailing_metadata() or ()]
        assert metadata == (named if isinstance(error, DiskFull) and fleet.calls else []), "a full disk alone is named"
        return caught.value.code(), caught.value.details() or "", fleet.calls

    yield call
    for server in servers:
        await server.close(0)


REGISTER = "/rlharvest.v1.Fleet/Register"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (InvalidField("slots", 0, "too few", "Set one."), Code.INVALID_ARGUMENT, "slots = 0: too few. Set one."),
        (NotFound("no such job"), Code.NOT_FOUND, "no such job"),
        (Conflict("it is over"), Code.ABORTED, "it is over"),
        (DiskFull(), Code.RESOURCE_EXHAUSTED, "no space"),
        (LimitReached("jobs", 3, "End one."), Code.RESOURCE_EXHAUSTED, "End one."),
        (Unavailable("no database"), Code.UNAVAILABLE, "no database"),
        (NotLeader(), Code.FAILED_PRECONDITION, NOT_LEADER),
        (Fenced(), Code.FAILED_PRECONDITION, NOT_LEADER),
        (RlharvestError("odd"), Code.INTERNAL, "odd"),
        (ZeroDivisionError("password=1"), Code.UNAVAILABLE, "try again"),
        (KeyError("password=1"), Code.INTERNAL, "its log says more"),
        (NotImplementedError(), Code.UNIMPLEMENTED, "does not have the method"),
    ],
)
async def test_an_error_has_the_status_of_its_kind(ask: Ask, error: Exception, code: Code, says: str) -> None:
    """What is not foreseen is in the log, and not in the answer."""
    found, details, calls = await ask(error, REGISTER, b"")
    assert (found, calls) == (code, 1)
    assert says in details
    assert "password" not in details


@pytest.mark.parametrize("data", [b"\xff" * 64, b"\x0a\x02\xc3\x28", b"\x0a\x7f", b"\x0b" * 200])
async def test_bytes_that_are_no_message_never_reach_the_service(ask: Ask, data: bytes) -> None:
    """Garbage, text that is not UTF-8, a field longer than the message, groups without end."""
    code, details, calls = await ask(NotFound(), REGISTER, data)
    assert (code, calls) == (Code.INVALID_ARGUMENT, 0)
    assert REGISTER in details
    assert f"{len(data)} bytes" in details


@pytest.mark.parametrize("text", ["x" * 1_000_000, "\ud800", "\N{SNOWMAN}" * 100_000, "\0\n\r"])
async def test_every_client_can_read_the_details(ask: Ask, text: str) -> None:
    """Trailers are small and hold no half of a surrogate pair; a status whose trailer is too large is lost on the way."""
    code, details, _ = await ask(NotFound(text), REGISTER, b"")
    assert code is Code.NOT_FOUND
    assert details
    assert len(details.encode()) <= rpc_faults.MAX_DETAILS


async def test_an_answer_that_nobody_waits_for_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """The caller's deadline passes while the server is busy: what it was about to refuse is forgotten, not logged."""
    answered = asyncio.Event()

    class Busy(fleet_pb2_grpc.FleetServicer):
        async def Register(
            self, request: fleet_pb2.RegisterRequest, context: grpc.aio.ServicerContext[Any, Any]
        ) -> fleet_pb2.RegisterReply:
            time.sleep(0.2)  # noqa: ASYNC251 - it is busy
            answered.set()
            await context.abort(Code.ABORTED, "it is over")
            raise AssertionError("abort raises")

    server = Server()
    server.add("rlharvest.v1.Fleet", fleet_pb2_grpc.add_FleetServicer_to_server, Busy())
    await server.start("127.0.0.1:0")
    with structlog.testing.capture_logs() as logged:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            method: Any = channel.unary_unary(REGISTER)
            for _ in range(5):
                answered.clear()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await method(b"", timeout=0.1)
                assert caught.value.code() is Code.DEADLINE_EXCEEDED
                # A busy machine may find the deadline passed before the call came in.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(answered.wait(), 1)
        await server.close(5)
    assert logged == []
    assert caplog.records == []


async def test_a_method_that_is_not_there_is_unimplemented(ask: Ask) -> None:
    assert (await ask(NotFound(), "/rlharvest.v1.Fleet/Nothing", b""))[0] is Code.UNIMPLEMENTED
    assert (await ask(NotFound(), "/grpc.health.v1.Health/List", b""))[0] is Code.UNIMPLEMENTED
