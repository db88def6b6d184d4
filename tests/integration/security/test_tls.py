"""Every connection encrypted, with certificates made here: who has the authority gets through, who has not does not."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import socket
import ssl
import struct
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
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
from rlharvest.testing.servers import Child, NatsServer, ValkeyServer
from rlharvest.tls import Tls
from rlharvest.v1 import batches_pb2, batches_pb2_grpc
from rlharvest.weights.transfer import Transfer
from rlharvest_coordinator import sql
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError


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


class EncryptedValkey(ValkeyServer):
    """valkey-server that speaks TLS alone, if it is built with it."""

    tls: Tls

    def command(self) -> list[str]:
        arguments = [argument for argument in super().command() if argument != str(self.port)]
        arguments[arguments.index("--port") + 1 : arguments.index("--port") + 1] = ["0"]
        files = ("--tls-cert-file", str(self.tls.certificate), "--tls-key-file", str(self.tls.key))
        return [*arguments, "--tls-port", str(self.port), *files, "--tls-auth-clients", "no"]

    def healthy(self) -> bool:
        try:
            with (
                socket.create_connection(("127.0.0.1", self.port), timeout=5) as plain,
                self.tls.client.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
            ):
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


@asynccontextmanager
async def front(port: int, tls: Tls) -> AsyncIterator[int]:
    """End TLS before a server that speaks plain text; yield the port."""
    pipes: set[asyncio.Task[None]] = set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        pipes.update((asyncio.create_task(pipe(reader, inner_writer)), asyncio.create_task(pipe(inner_reader, writer))))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls.server)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for task in pipes:
        task.cancel()
    await asyncio.gather(*pipes, return_exceptions=True)


@pytest.fixture(params=["its own", "in front of it"])
async def encrypted_valkey(request: pytest.FixtureRequest, tmp_path: Path, tls: Tls) -> AsyncIterator[int]:
    """Port of a Valkey with TLS: its own where the server on PATH has it; the one of the wheel is built without."""
    if request.param == "its own":
        own = EncryptedValkey(tmp_path / "valkey")
        own.tls = tls
        try:
            own.start()
        except Unavailable as error:
            if "tls" not in str(error).lower():
                raise
            pytest.skip("this valkey-server is built without TLS")
        yield own.port
        own.stop()
        return
    server = ValkeyServer(tmp_path / "valkey")
    server.start()
    async with front(server.port, tls) as port:
        yield port
    server.stop()


class EncryptedPostgres(Child):
    """PostgreSQL that takes nobody without TLS; at two addresses, of which its certificate has one."""

    name = "postgres"
    tls: Tls
    programs: Path

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.account = pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
        self.data = directory / "data"

    def make(self) -> None:
        """Make an empty cluster, of a user that it accepts: never root."""
        for source, name in ((self.tls.certificate, "cert.pem"), (self.tls.key, "key.pem")):
            assert source is not None
            (self.directory / name).write_bytes(source.read_bytes())
        (self.directory / "key.pem").chmod(0o600)
        for path in (self.directory, *self.directory.iterdir()):
            os.chown(path, self.account.pw_uid, self.account.pw_gid)
        options = ("-U", "rlharvest", "-E", "UTF8", "--auth=trust", "--no-sync")
        self._run(str(self.programs / "initdb"), "-D", str(self.data), *options)
        (self.data / "pg_hba.conf").write_text("hostssl all all 127.0.0.0/8 trust\n")

    def _run(self, *command: str) -> None:
        subprocess.run(
            command, user=self.account.pw_uid, group=self.account.pw_gid, cwd="/", check=True, capture_output=True
        )

    def command(self) -> list[str]:
        settings = {
            "ssl": "on",
            "ssl_cert_file": self.directory / "cert.pem",
            "ssl_key_file": self.directory / "key.pem",
            "listen_addresses": "127.0.0.1,127.0.0.2",
            "unix_socket_directories": self.directory,
            "fsync": "off",
        }
        given = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        ids = (f"--reuid={self.account.pw_uid}", f"--regid={self.account.pw_gid}", "--clear-groups")
        other = ["setpriv", *ids] if os.geteuid() == 0 else []
        return [*other, str(self.programs / "postgres"), "-D", str(self.data), "-p", str(self.port), *given]

    def healthy(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(struct.pack("!ii", 8, 80877103))  # SSLRequest
                return connection.recv(1) == b"S"
        except OSError:
            return False


@pytest.fixture
def encrypted_postgres(tls: Tls) -> Iterator[EncryptedPostgres]:
    """A PostgreSQL of this machine: the one of the wheel is built without TLS."""
    found = [shutil.which("initdb"), *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")))]
    programs = [Path(each).resolve().parent for each in found if each is not None]
    if not programs or shutil.which("setpriv") is None:
        pytest.skip("no PostgreSQL of this machine")
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # pytest's own directories are closed to other users
        server = EncryptedPostgres(Path(directory))
        server.tls, server.programs = tls, programs[-1]
        server.make()
        server.start(timeout_s=60)
        yield server
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


async def test_postgresql(
    encrypted_postgres: EncryptedPostgres, tls: Tls, stranger: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/operations.md says: `?ssl=verify-full` in the URL, the authority in PGSSLROOTCERT."""
    port = encrypted_postgres.port

    async def ask(authority: Tls, host: str = "127.0.0.1", mode: str = "verify-full") -> bool:
        monkeypatch.setenv("PGSSLROOTCERT", str(authority.ca))
        engine = sql.connect(f"postgresql+asyncpg://rlharvest@{host}:{port}/postgres?ssl={mode}")
        try:
            async with engine.connect() as connection:
                question = text("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")
                return bool((await connection.execute(question)).scalar_one())
        finally:
            await engine.dispose()

    assert await ask(tls)
    with pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed"):
        await ask(stranger)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"127\.0\.0\.2"):
        await ask(tls, "127.0.0.2")
    with pytest.raises(DBAPIError, match="no encryption"):
        await ask(tls, mode="disable")


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
