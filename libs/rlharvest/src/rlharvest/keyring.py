"""The secrets of one system, in a directory with one subdirectory a holder: who holds what, and how they are made.

    coordinator/  api_token worker_token service_token nats_account_seed nats_credentials redis_password sql_password
    trainer/      service_token nats_credentials
    weights/      service_token worker_token nats_credentials
    reward/       nats_credentials
    rollout/      worker_token
    nats/         accounts.conf            for the server
    valkey/       users.acl                for the server
    postgres/     sql_password             for the server

A file is named as the setting that takes it, so RLHARVEST_SECRETS_DIR=…/trainer gives a trainer all of its own and nothing
else. What is in coordinator/ is made at random when it is missing and never changed; everything else follows from it and is
written again each time. Invariant: files are replaced whole, and only their owner reads them unless `readable` is asked for.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rlharvest.accounts import Account, new_seed
from rlharvest.errors import InvalidField
from rlharvest.grants import SERVICES, grant

Holder = Literal["coordinator", "trainer", "weights", "reward", "rollout", "nats", "valkey", "postgres"]
HOLDERS: tuple[Holder, ...] = ("coordinator", "trainer", "weights", "reward", "rollout", "nats", "valkey", "postgres")

TOKENS = ("api_token", "worker_token", "service_token")
GIVEN = ("api_token", "worker_token", "service_token", "redis_password", "sql_password")
"""What may be chosen instead of made, by the variable RLHARVEST_<NAME>."""

REDIS_USER = "coordinator"
"""Valkey's user that keeps the ledger."""


def given_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets that the environment chooses: RLHARVEST_API_TOKEN, or a file named by RLHARVEST_API_TOKEN_FILE.

    Raises:
        OSError: such a file cannot be read.
    """
    found = {}
    for name in GIVEN:
        path = environment.get(f"RLHARVEST_{name.upper()}_FILE")
        value = environment.get(f"RLHARVEST_{name.upper()}") or (Path(path).read_text(encoding="utf-8") if path else "")
        if value.strip():
            found[name] = value.strip()
    return found


class Keyring:
    """One directory of secrets.

    Args:
        path: made when it is missing.
        readable: whether every user who can reach the directory may read it; for volumes that only one container mounts.
    """

    def __init__(self, path: Path, *, readable: bool = False) -> None:
        self.path = path
        self._modes = (0o755, 0o444) if readable else (0o700, 0o600)

    def holder(self, name: Holder) -> Path:
        """Return the directory of one holder."""
        return self.path / name

    def token(self, name: str) -> str:
        """Return the token of this name that clients send now."""
        return self._read(name).splitlines()[0]

    def account(self) -> Account:
        """Return the NATS account, with which users can be made."""
        return Account(self._read("nats_account_seed"))

    def redis_url(self, port: int, host: str = "127.0.0.1") -> str:
        """Return the URL of the ledger's store with user and password."""
        return f"redis://{REDIS_USER}:{self._read('redis_password')}@{host}:{port}/0"

    def make(self, given: Mapping[str, str] | None = None) -> None:
        """Make what is missing and write what follows from it.

        Args:
            given: values to use instead of random ones, by name (see GIVEN); they replace what is there.

        Raises:
            InvalidField: the directory cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for directory in (self.path, *map(self.holder, HOLDERS)):
                directory.mkdir(exist_ok=True)
                if directory.stat().st_uid == os.getuid():  # another's is a mount of a container
                    directory.chmod(self._modes[0])
            for name in GIVEN:
                self._keep("coordinator", name, (given or {}).get(name) or None, secrets.token_urlsafe(32))
            self._keep("coordinator", "nats_account_seed", None, new_seed("account"))
            self._follow()
        except OSError as error:
            fix = "Choose a directory that can be written."
            raise InvalidField("DIR", str(error.filename), error.strerror or str(error), fix) from error

    def rotate(self, name: str) -> None:
        """Put a new token before the present one, which stays good until the next time; older ones end.

        Raises:
            InvalidField: there is no such token.
        """
        if name not in TOKENS:
            raise InvalidField("--rotate", name, "not a token", f"Tokens: {', '.join(TOKENS)}.")
        self._write("coordinator", name, f"{secrets.token_urlsafe(32)}\n{self.token(name)}\n")
        self._follow()

    def _follow(self) -> None:
        """Write what follows from the coordinator's secrets."""
        shared: tuple[tuple[str, tuple[Holder, ...]], ...] = (
            ("service_token", ("trainer", "weights")),
            ("worker_token", ("rollout", "weights")),
            ("sql_password", ("postgres",)),
        )
        for name, holders in shared:
            for holder in holders:
                self._write(holder, name, self._read(name) + "\n")
        account = self.account()
        for role in SERVICES:
            self._write(role, "nats_credentials", account.credential(role, grant(role, role)).text())
        self._write("nats", "accounts.conf", account.server_config())
        self._write("valkey", "users.acl", users_acl(self._read("redis_password")))

    def _keep(self, holder: Holder, name: str, given: str | None, made: str) -> None:
        path = self.holder(holder) / name
        if given is not None and (not path.exists() or given not in self._read(name).splitlines()):
            self._write(holder, name, given + "\n")
        elif not path.exists():
            self._write(holder, name, made + "\n")

    def _read(self, name: str) -> str:
        return (self.holder("coordinator") / name).read_text(encoding="utf-8").strip()

    def _write(self, holder: Holder, name: str, text: str) -> None:
        path = self.holder(holder) / name
        temporary = path.with_name(f".{name}.new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, self._modes[1])
            file.write(text)
        temporary.replace(path)


def users_acl(password: str) -> str:
    """Return Valkey's list of users: who has not logged in may ask whether it is there; the coordinator has its own keys.

    Every key of the ledger begins with `rlharvest:`. What can stop, reconfigure, empty or copy the server is left out.
    """
    digest = hashlib.sha256(password.encode()).hexdigest()
    return (
        "user default on nopass sanitize-payload resetkeys resetchannels -@all +ping\n"
        f"user {REDIS_USER} on #{digest} sanitize-payload ~rlharvest:* resetchannels -@all +@read +@write +@connection "
        "-@dangerous -@scripting +info +config|get +function|load +fcall +waitaof\n"
    )
