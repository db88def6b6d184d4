"""A small HTTP server that misbehaves on request, and versions to pull from it."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rlharvest.weights.manifest import Manifest, describe

PART_BYTES = 1000


@dataclass
class Asked:
    """A request for a blob: bytes start … end-1 of data; `ranged` when a Range asked for them."""

    digest: str
    data: bytes
    start: int
    end: int
    ranged: bool
    count: int
    """How many requests came before it."""

    @property
    def wanted(self) -> bytes:
        return self.data[self.start : self.end]


class Handler(BaseHTTPRequestHandler):
    """Hands each request to the server's behaviour."""

    protocol_version = "HTTP/1.1"
    server: BlobServer

    def do_GET(self) -> None:
        digest = self.path.rpartition("/")[2]
        data = self.server.blobs[digest]
        with self.server.lock:
            count = self.server.requests
            self.server.requests += 1
            self.server.headers.append(dict(self.headers.items()))
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, end = (int(match[1]), int(match[2]) + 1) if match else (0, len(data))
        self.server.behaviour(self, Asked(digest, data, start, end, match is not None, count))

    def reply(self, status: int, body: bytes, *, announce: int | None = None, **headers: str) -> None:
        """Answer; `announce` is another Content-Length than the body's (the connection is closed then)."""
        length = len(body) if announce is None else announce
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        self.server.sent += len(body)
        if length != len(body):
            self.close_connection = True

    def part(self, asked: Asked) -> None:
        """Answer as a good server does."""
        if asked.ranged:
            where = f"bytes {asked.start}-{asked.end - 1}/{len(asked.data)}"
            self.reply(206, asked.wanted, Content_Range=where)
        else:
            self.reply(200, asked.data)

    def log_message(self, format: str, *args: object) -> None:
        pass


Behaviour = Callable[[Handler, Asked], None]


class BlobServer(ThreadingHTTPServer):
    """Serves `blobs` by digest, in the way of `behaviour`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.blobs: dict[str, bytes] = {}
        self.behaviour: Behaviour = Handler.part
        self.requests = 0
        self.sent = 0
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that hang up are part of the tests


@pytest.fixture
def blob_server() -> Iterator[BlobServer]:
    """A server of blobs that can be told to misbehave."""
    server = BlobServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass
class Versions:
    """Makes versions of job rljob_t out of named contents."""

    directory: Path
    server: BlobServer
    made: int = field(default=0)

    def make(self, files: dict[str, bytes], *, part_bytes: int = PART_BYTES) -> Manifest:
        entries = []
        for name, data in files.items():
            path = self.directory / name
            path.write_bytes(data)
            entry = describe(path, part_bytes=part_bytes)
            self.server.blobs[entry.blake3] = data
            entries.append(entry)
        manifest = Manifest(job="rljob_t", version=self.made, step=self.made, files=tuple(entries))
        self.made += 1
        return manifest


@pytest.fixture
def versions(tmp_path: Path, blob_server: BlobServer) -> Versions:
    """Versions that `blob_server` has."""
    directory = tmp_path / "made"
    directory.mkdir()
    return Versions(directory, blob_server)


@pytest.fixture
def content() -> Callable[[int], bytes]:
    """Returns as many pseudo-random bytes as asked."""
    return random.Random(7).randbytes
