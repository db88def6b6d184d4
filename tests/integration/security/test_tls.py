"""Every connection encrypted, with certificates made here: who has the authority gets through, who has not does not."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from aiohttp import web
from nats.errors import Error as NatsError
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from rlharvest import bus
from rlharvest.credentials import Caller
from rlharvest.errors import InvalidField, Unavailable
from rlharvest.ledger.store import Store
from rlharvest.rpc import Client, Server
from rlharvest.settings import LedgerSettings
from rlharvest.testing.servers import NatsServer, ValkeyServer
from rlharvest.tls import Tls
from rlharvest.v1 import batches_pb2, batches_pb2_grpc
from rlharvest.weights.transfer import Transfer


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """A certificate for 127.0.0.1, and the authority that signed it."""
    directory = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    signed = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    signed.private_key_pem.write_to_path(str(directory / "key.pem"))
    for number, part in enumerate(signed.cert_chain_pems):
        part.write_to_path(str(directory / "cert.pem"), append=number > 0)
    return Tls(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """Believes another authority."""
    path = tmp_path_factory.mktemp("other") / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(path))
    return Tls(path)


class EncryptedNats(NatsServer):
    """nats-server that speaks TLS."""

    tls: Tls

    def command(self) -> list[str]:
        command = super().command()
        with (self.directory / "nats.conf").open("a") as config:
            config.write(f'tls {{ cert_file: "{self.tls.certificate}", key_file: "{self.tls.key}" }}\n')
        return command


@pytest.fixture
def nats(tmp_path: Path, tls: Tls) -> Iterator[EncryptedNats]:
    server = EncryptedNats(tmp_path / "nats")
    server.tls = tls
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def encrypted_valkey(tmp_path: Path, tls: Tls) -> AsyncIterator[int]:
    """Port of a Valkey behind TLS, which is ended before it: the server of the wheel is built without."""
    server = ValkeyServer(tmp_path / "valkey")
    server.start()
    pipes: set[asyncio.Task[None]] = set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)
        pipes.update((asyncio.create_task(pipe(reader, inner_writer)), asyncio.create_task(pipe(inner_reader, writer))))

    front = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls.server)
    yield front.sockets[0].getsockname()[1]
    front.close()
    for task in pipes:
        task.cancel()
    await asyncio.gather(*pipes, return_exceptions=True)
    server.stop()


async def test_nats(nats: EncryptedNats, tls: Tls, stranger: Tls) -> None:
    url = f"tls://127.0.0.1:{nats.port}"
    client = await bus.connect(url, "friend", tls=tls.client)
    await bus.ensure_streams(client.jetstream())
    await client.close()
    with pytest.raises((Unavailable, ssl.SSLError, NatsError)):
        await bus.connect(url, "stranger", tls=stranger.client, timeout_s=2)


async def test_valkey(encrypted_valkey: int, tls: Tls, stranger: Tls) -> None:
    url = f"rediss://127.0.0.1:{encrypted_valkey}/0"
    store = Store.connect(LedgerSettings(redis_url=url, tls_ca=tls.ca).ledger_url)
    await store.prepare()
    await store.close()
    async with Redis.from_url(LedgerSettings(redis_url=url, tls_ca=stranger.ca).ledger_url, socket_timeout=30) as redis:
        with pytest.raises(RedisConnectionError, match="certificate"):
            await redis.ping()


class Batches(batches_pb2_grpc.BatchesServicer):
    """Answers."""

    async def Claim(self, request: batches_pb2.ClaimRequest, context: object) -> batches_pb2.ClaimReply:
        return batches_pb2.ClaimReply()


async def test_grpc(tls: Tls, stranger: Tls) -> None:
    server = Server(tls=tls.listener)
    server.add("rlharvest.v1.Batches", batches_pb2_grpc.add_BatchesServicer_to_server, Batches())
    await server.start("127.0.0.1:0")

    async def claim(tls: Tls, total_s: float) -> None:
        client = Client(f"127.0.0.1:{server.port}", Caller(tls=tls))
        try:
            request = batches_pb2.ClaimRequest()
            await client.call(
                batches_pb2_grpc.BatchesStub, lambda stub: stub.Claim, request, timeout_s=total_s, total_s=total_s
            )
        finally:
            await client.close()

    await claim(tls, 60.0)
    for wrong in (stranger, Tls()):
        with pytest.raises(Unavailable):
            await claim(wrong, 1.0)
    await server.close(0)


async def test_http(tls: Tls, stranger: Tls) -> None:
    """As the weight service serves, and as workers (threads) and others (httpx) ask."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=request.headers.get("Authorization", ""))

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls.server).start()
    url = f"https://127.0.0.1:{runner.addresses[0][1]}"

    def ask(tls: Tls) -> int:
        transfer = Transfer(url, timeout_s=30, total_s=60, caller=Caller(tls=tls))
        try:
            connection = transfer.connection()
            connection.request("GET", "/")
            return connection.getresponse().status
        finally:
            transfer.close()

    assert await asyncio.to_thread(ask, tls) == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.to_thread(ask, stranger)
    async with httpx.AsyncClient(verify=tls.client) as client:
        assert (await client.get(url)).status_code == 200
    async with httpx.AsyncClient(verify=stranger.client) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
    await runner.cleanup()


def test_a_name_that_the_certificate_does_not_have_is_refused(tls: Tls) -> None:
    assert tls.client.check_hostname
    assert tls.client.verify_mode is ssl.CERT_REQUIRED
    assert tls.client.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(InvalidField, match=r"RLHARVEST_TLS_CA.*ca\.pem"):
        _ = Tls(tmp_path / "ca.pem").client
    with pytest.raises(InvalidField, match="RLHARVEST_TLS_CERT"):
        _ = Tls(None, tmp_path / "no.pem", tmp_path / "no.pem").server
