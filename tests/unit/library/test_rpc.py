"""gRPC: calls find the leader among several addresses, and no call waits for ever."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rlharvest import rpc_faults
from rlharvest.errors import InvalidField, LimitReached, Unavailable
from rlharvest.rpc import MAX_MESSAGE_BYTES, NOT_LEADER, Client, Server
from rlharvest.testing.servers import free_port
from rlharvest.v1 import fleet_pb2, fleet_pb2_grpc

NAME = "rlharvest.v1.Fleet"


class Fleet(fleet_pb2_grpc.FleetServicer):
    """Answers, or says that it does not lead."""

    def __init__(self, incarnation: int, *, leads: bool = True) -> None:
        self.incarnation = incarnation
        self.leads = leads
        self.calls = 0

    async def Register(
        self, request: fleet_pb2.RegisterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.RegisterReply:
        self.calls += 1
        if not self.leads:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, NOT_LEADER)
        if request.worker == "bad":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such worker")
        return fleet_pb2.RegisterReply(incarnation=self.incarnation)

    async def Leave(
        self, request: fleet_pb2.LeaveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.LeaveReply:
        return fleet_pb2.LeaveReply()

    async def GetPrefix(
        self, request: fleet_pb2.GetPrefixRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.GetPrefixReply:
        return fleet_pb2.GetPrefixReply()


@asynccontextmanager
async def serving(fleet: Fleet, address: str = "127.0.0.1:0") -> AsyncIterator[Server]:
    server = Server()
    server.add(NAME, fleet_pb2_grpc.add_FleetServicer_to_server, fleet)
    await server.start(address)
    try:
        yield server
    finally:
        await server.close(0)


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(*ports: int) -> Client:
        clients.append(Client(",".join(f"127.0.0.1:{port}" for port in ports)))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


async def register(client: Client, worker: str = "wkr_1", *, total_s: float = 10.0) -> int:
    request = fleet_pb2.RegisterRequest(worker=worker)
    reply = await client.call(
        fleet_pb2_grpc.FleetStub, lambda stub: stub.Register, request, timeout_s=2.0, total_s=total_s
    )
    return int(reply.incarnation)


async def test_a_call_goes_past_who_does_not_lead(connect: Callable[..., Client]) -> None:
    """And the next one goes straight to who does."""
    standby, leader = Fleet(1, leads=False), Fleet(2)
    async with serving(standby) as one, serving(leader) as two:
        client = connect(one.port, two.port)
        assert await register(client) == 2
        assert await register(client) == 2
    assert (standby.calls, leader.calls) == (1, 2)


async def test_a_call_goes_past_who_does_not_answer(connect: Callable[..., Client]) -> None:
    async with serving(Fleet(7)) as server:
        assert await register(connect(free_port(), server.port)) == 7


async def test_a_call_comes_back_to_who_leads_now(connect: Callable[..., Client]) -> None:
    """The leader of before lost it, the other one has it."""
    one, two = Fleet(1), Fleet(2, leads=False)
    async with serving(one) as first, serving(two) as second:
        client = connect(first.port, second.port)
        assert await register(client) == 1
        one.leads, two.leads = False, True
        assert await register(client) == 2


async def test_a_call_without_a_leader_ends_and_names_the_addresses(connect: Callable[..., Client]) -> None:
    port = free_port()
    with pytest.raises(Unavailable, match=f"127.0.0.1:{port} after 0.3 s"):
        await register(connect(port), total_s=0.3)


async def test_an_error_of_the_application_is_raised_at_once(connect: Callable[..., Client]) -> None:
    fleet = Fleet(1)
    async with serving(fleet) as server:
        with pytest.raises(grpc.aio.AioRpcError, match="no such worker"):
            await register(connect(server.port), "bad")
    assert fleet.calls == 1


async def test_every_server_says_whether_it_can_work() -> None:
    async with serving(Fleet(1)) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", NAME):
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        await server.serving(False)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=NAME), timeout=5)
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InvalidField, match="RLHARVEST_GRPC_ADDRESS") as caught:
            async with serving(Fleet(1), address):
                pass
    assert caught.value.value == address
    assert caught.value.fix


async def test_a_message_over_the_limit_is_refused_and_the_server_goes_on(connect: Callable[..., Client]) -> None:
    """A request as large as a memory would be taken whole otherwise."""
    async with serving(Fleet(1)) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fleet_pb2_grpc.FleetStub(channel).Register(
                fleet_pb2.RegisterRequest(build="b" * (MAX_MESSAGE_BYTES + 1)), timeout=30
            )
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(MAX_MESSAGE_BYTES) in str(caught.value.details())
        assert await register(connect(server.port)) == 1


def test_details_are_cut_to_what_a_trailer_holds() -> None:
    code, details = rpc_faults.status(InvalidField("f", "v", "é" * 10_000, "Fix it."))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert rpc_faults.MAX_DETAILS - 3 <= len(details.encode()) <= rpc_faults.MAX_DETAILS
    assert details.startswith("f = 'v'")


def test_a_limit_that_is_reached_is_told_by_its_own_status() -> None:
    code, details = rpc_faults.status(LimitReached("workers", 7, "Stop some."))
    assert (code, details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "workers: the limit of 7 is reached. Stop some.")
