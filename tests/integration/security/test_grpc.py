"""A gRPC server with roles: who gets through, who does not, and that a token is replaced while it serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rlharvest.access import Access
from rlharvest.accounts import Candidate
from rlharvest.credentials import Caller, Tokens
from rlharvest.keyring import Keyring
from rlharvest.rpc import Client, Server
from rlharvest.v1 import batches_pb2, batches_pb2_grpc, fleet_pb2, fleet_pb2_grpc
from rlharvest_coordinator.admission import Admission


class Fleet(fleet_pb2_grpc.FleetServicer):
    """Notes who came through."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.registered: list[str] = []

    async def Admit(self, request: fleet_pb2.AdmitRequest, context: Any) -> fleet_pb2.AdmitReply:
        return self.admission.admit(request)

    async def Register(self, request: fleet_pb2.RegisterRequest, context: Any) -> fleet_pb2.RegisterReply:
        self.registered.append(request.worker)
        return fleet_pb2.RegisterReply(incarnation=1)


class Batches(batches_pb2_grpc.BatchesServicer):
    """Answers."""

    async def Claim(self, request: batches_pb2.ClaimRequest, context: Any) -> batches_pb2.ClaimReply:
        return batches_pb2.ClaimReply()


class Coordinator:
    """A server with the roles of a coordinator."""

    def __init__(self, secrets: Path, keyring: Keyring) -> None:
        self.secrets = secrets
        account = keyring.account()
        self.fleet = Fleet(Admission(account, 60.0))
        tokens = {role: self.token(f"{role}_token") for role in ("api", "worker", "service")}
        self.server = Server(access=Access(tokens, account.worker_of))  # type: ignore[arg-type]  # roles are literals
        self.server.add("rlharvest.v1.Fleet", fleet_pb2_grpc.add_FleetServicer_to_server, self.fleet)
        self.server.add("rlharvest.v1.Batches", batches_pb2_grpc.add_BatchesServicer_to_server, Batches())

    def token(self, name: str) -> Tokens:
        return Tokens(file=self.secrets / name)

    async def call(self, tokens: Tokens | None, stub: Any, name: str, request: Any) -> Any:
        client = Client(f"127.0.0.1:{self.server.port}", Caller(tokens))
        try:
            return await client.call(stub, lambda made: getattr(made, name), request, timeout_s=30, total_s=60)
        finally:
            await client.close()

    async def refusal(self, tokens: Tokens | None, stub: Any, name: str, request: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.call(tokens, stub, name, request)
        return refused.value.code()


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[Coordinator]:
    keyring = Keyring(tmp_path / "secrets")
    keyring.make()
    made = Coordinator(keyring.holder("coordinator"), keyring)
    await made.server.start("127.0.0.1:0")
    yield made
    await made.server.close(0)


FLEET, BATCHES = fleet_pb2_grpc.FleetStub, batches_pb2_grpc.BatchesStub
CLAIM = batches_pb2.ClaimRequest(trainer="t")


def request_of(candidate: Candidate) -> fleet_pb2.AdmitRequest:
    return fleet_pb2.AdmitRequest(worker=candidate.name, public_key=candidate.key, proof=candidate.proof)


async def test_each_role_reaches_its_methods_only(coordinator: Coordinator) -> None:
    service, worker, api = (coordinator.token(f"{role}_token") for role in ("service", "worker", "api"))
    await coordinator.call(service, BATCHES, "Claim", CLAIM)
    for other in (worker, api):
        assert await coordinator.refusal(other, BATCHES, "Claim", CLAIM) is grpc.StatusCode.PERMISSION_DENIED
    for nobody in (None, Tokens(["guess"]), Tokens([service.current[:-1]])):
        assert await coordinator.refusal(nobody, BATCHES, "Claim", CLAIM) is grpc.StatusCode.UNAUTHENTICATED


async def test_a_worker_is_admitted_and_then_acts_in_its_own_name_only(coordinator: Coordinator) -> None:
    shared = coordinator.token("worker_token")
    one, two = Candidate(), Candidate()
    admitted = await coordinator.call(shared, FLEET, "Admit", request_of(one))
    own = Tokens([admitted.jwt])
    await coordinator.call(own, FLEET, "Register", fleet_pb2.RegisterRequest(worker=one.name))
    for tokens in (shared, own):
        request = fleet_pb2.RegisterRequest(worker=two.name)
        assert await coordinator.refusal(tokens, FLEET, "Register", request) is grpc.StatusCode.PERMISSION_DENIED
    assert coordinator.fleet.registered == [one.name]


async def test_another_worker_s_name_is_not_given_away(coordinator: Coordinator) -> None:
    victim, thief = Candidate(), Candidate()
    request = fleet_pb2.AdmitRequest(worker=victim.name, public_key=victim.key, proof=thief.proof)
    code = await coordinator.refusal(coordinator.token("worker_token"), FLEET, "Admit", request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_token_is_rotated_while_the_server_runs(coordinator: Coordinator) -> None:
    """Clients move over at their own pace: both tokens are good in between, and no call fails."""
    keyring = Keyring(coordinator.secrets.parent)
    before = Tokens([keyring.token("service_token")])
    keyring.rotate("service_token")
    after = Tokens([keyring.token("service_token")])
    for tokens in (before, after):
        await coordinator.call(tokens, BATCHES, "Claim", CLAIM)
    keyring.rotate("service_token")
    assert await coordinator.refusal(before, BATCHES, "Claim", CLAIM) is grpc.StatusCode.UNAUTHENTICATED
    await coordinator.call(after, BATCHES, "Claim", CLAIM)


async def test_health_needs_no_token(coordinator: Coordinator) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{coordinator.server.port}") as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_what_an_unknown_caller_sends_is_not_parsed(coordinator: Coordinator) -> None:
    """It is refused for who it is, not for what it says."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{coordinator.server.port}") as channel:
        call = channel.unary_unary("/rlharvest.v1.Batches/Claim")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asyncio.wait_for(call(b"\xff" * 100), 30)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
