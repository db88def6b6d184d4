"""The proxy forwards, forgets to, and forwards again; nobody's connection is closed meanwhile."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from rlharvest.testing.proxy import Proxy


@pytest.fixture
def echoing() -> Iterator[str]:
    """A server that says what it hears."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection:
                while data := connection.recv(1024):
                    connection.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        yield f"redis://user@127.0.0.1:{server.getsockname()[1]}/0"
        server.shutdown(socket.SHUT_RDWR)


def test_what_is_said_in_a_black_hole_arrives_when_it_ends_and_nothing_is_closed(echoing: str) -> None:
    with Proxy(echoing) as proxy:
        assert proxy.url == f"redis://user@127.0.0.1:{proxy.port}/0"
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
            client.sendall(b"one")
            assert client.recv(10) == b"one"
            proxy.swallow()
            client.sendall(b"two")
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(10)
            proxy.forward()
            client.settimeout(10)
            assert client.recv(10) == b"two"


def test_a_server_that_goes_is_seen_to_go(echoing: str) -> None:
    """Only silence is made; an end is passed on."""
    with Proxy(echoing) as proxy, socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
        client.sendall(b"one")
        assert client.recv(10) == b"one"
        client.shutdown(socket.SHUT_WR)
        assert client.recv(10) == b""
