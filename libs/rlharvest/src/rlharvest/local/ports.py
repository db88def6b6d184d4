"""Ports of the programs on this machine: given, remembered or free ones.

Invariants: a port is chosen below the kernel's range for outgoing connections. Inside of it a client that reconnects to
a server that is down may be given the server's own port, connect to itself, and keep the server from coming back. A port
that a process has claimed is not chosen by another one before a server listens on it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from rlharvest.errors import InvalidField

DEFAULTS: dict[str, int] = {
    "api": 8080,
    "nats": 4222,
    "nats-monitor": 8222,
    "valkey": 6379,
    "grpc": 7081,
    "weights-http": 7083,
    "weights-grpc": 7084,
}
_FIRST = 17000
_MOST_CLAIMS = 256
_claims: dict[int, int] = {}
"""Open descriptors, by port."""
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on it now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def claim(port: int) -> bool:
    """Whether a server could listen on a port now; where it could, the port is this process's until it ends.

    The claim is a name that the kernel knows beside the port, so that programs can take it without a further word. Of
    very many claims the oldest are given up. Only Linux has such names; elsewhere nothing is claimed.
    """
    if not is_free(port):
        return False
    if port not in _claims and sys.platform == "linux":
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0rlharvest-port-{port}")
        except OSError:
            name.close()
            return False
        _claims[port] = name.detach()
        while len(_claims) > _MOST_CLAIMS:
            os.close(_claims.pop(next(iter(_claims))))
    return True


def holder(port: int) -> str:
    """Return who listens on a port, e.g. `nginx (pid 312)`, as far as this user may see it."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return "another program"
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            try:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.Error:
                continue
    return "another program"


def choose(
    names: Iterable[str],
    *,
    given: Mapping[str, int],
    remembered: Mapping[str, int],
    free: Callable[[int], bool] = claim,
    who: Callable[[int], str] = holder,
    first: int | None = None,
) -> dict[str, int]:
    """Return a port for each name.

    A given port other than 0 is taken or refused; else the remembered one, else the default, else the next free one.
    The API alone never moves by itself, since people type its address: 0 must be given for that.

    Raises:
        InvalidField: a port that was asked for is in use; names its holder.
    """
    chosen: dict[str, int] = {}
    candidate = _first() if first is None else first
    for name in names:
        wanted = given.get(name)
        fixed = wanted if wanted else None
        if name == "api" and wanted is None:
            fixed = remembered.get(name, DEFAULTS["api"])
        if fixed is not None:
            if not free(fixed) or fixed in chosen.values():
                ours = [other for other, port in chosen.items() if port == fixed]
                by = f"this launcher's {ours[0]}" if ours else who(fixed)
                option = "--port" if name == "api" else f"--{name}-port"
                raise InvalidField(
                    option,
                    fixed,
                    f"the port is in use by {by}",
                    f"Stop that, or choose another: {option} {fixed + 1}, or {option} 0 for any free one.",
                )
            chosen[name] = fixed
            continue
        preferred = [port for port in (remembered.get(name), DEFAULTS.get(name)) if port and wanted != 0]
        for port in preferred:
            if port not in chosen.values() and free(port):
                chosen[name] = port
                break
        else:
            while candidate in chosen.values() or candidate in remembered.values() or not free(candidate):
                candidate += 1
            chosen[name] = candidate
    return chosen


def _first() -> int:
    """Return where the search for a free port starts: below the kernel's range when that leaves room."""
    try:
        low = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _FIRST
    return _FIRST if low > _FIRST + 1000 else max(1025, low - 1000)
