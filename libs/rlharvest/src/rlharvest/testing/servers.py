"""Real NATS and Valkey servers for tests: started on free ports, killed with SIGKILL when a test wants it, restarted on the
same files and port.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from rlharvest import programs
from rlharvest.accounts import Credential
from rlharvest.errors import Unavailable
from rlharvest.grants import Grant
from rlharvest.keyring import Keyring
from rlharvest.local.ports import claim

_given: set[int] = set()
"""Ports of servers of this process, which may be down for a while."""


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens on now, and that no other process is given.

    It is drawn from below the range that systems give to outgoing connections, so that none of those takes it before the
    server that it is for has started.
    """
    while True:
        port = random.randint(12_000, 31_999)
        if port not in _given and claim(port):
            _given.add(port)
            return port


class Child:
    """A server process with its own directory."""

    name = "server"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """Return the command line."""
        raise NotImplementedError

    def healthy(self) -> bool:
        """Whether it answers."""
        raise NotImplementedError

    def start(self, *, timeout_s: float = 15.0) -> None:
        """Start it and wait until it answers."""
        with (self.directory / "log").open("ab") as output:
            self.process = subprocess.Popen(self.command(), stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            if self.healthy():
                return
            time.sleep(0.02)
        tail = (self.directory / "log").read_text(errors="replace")[-2000:]
        raise Unavailable(f"{self.name} did not come up on port {self.port}:\n{tail}")

    def signal(self, number: int) -> None:
        """Send it a signal, e.g. SIGSTOP."""
        if self.process is not None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL it and wait until it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """Stop it in order; SIGKILL after 5 s."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()


class NatsServer(Child):
    """nats-server with JetStream on files; with a keyring it lets in only who has a credential of it."""

    name = "nats-server"

    def __init__(self, directory: Path, keyring: Keyring | None = None) -> None:
        super().__init__(directory)
        self.monitor_port = free_port()
        self.keyring = keyring

    @property
    def credential(self) -> Credential | None:
        """A new credential that may do everything, for tests."""
        if self.keyring is None:
            return None
        return self.keyring.account().credential("tester", Grant((">",), (">",), answers=True))

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        config = self.directory / "nats.conf"
        config.write_text(
            programs.nats_config(
                host="127.0.0.1",
                port=self.port,
                monitor_port=self.monitor_port,
                store=self.directory / "jetstream",
                accounts=(self.keyring.holder("nats") / "accounts.conf").read_text() if self.keyring else "",
            )
        )
        return [os.fspath(programs.nats_server()), "-c", os.fspath(config)]

    def healthy(self) -> bool:
        url = f"http://127.0.0.1:{self.monitor_port}/healthz?js-enabled-only=true"
        try:
            with urllib.request.urlopen(url, timeout=1) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False


class ValkeyServer(Child):
    """valkey-server with AOF; with a keyring it lets in only whom that names, and a tester."""

    name = "valkey-server"

    def __init__(self, directory: Path, keyring: Keyring | None = None) -> None:
        super().__init__(directory)
        self.keyring = keyring

    @property
    def url(self) -> str:
        """The URL of somebody who may do everything."""
        login = "" if self.keyring is None else "tester:tester@"
        return f"redis://{login}127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        users = None
        if self.keyring is not None:
            users = self.directory / "users.acl"
            known = (self.keyring.holder("valkey") / "users.acl").read_text()
            users.write_text(known + "user tester on >tester ~* &* +@all\n")
        arguments = programs.valkey_arguments(host="127.0.0.1", port=self.port, directory=self.directory, users=users)
        return [os.fspath(programs.valkey_server()), *arguments]

    def healthy(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
