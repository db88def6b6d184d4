"""Bearer tokens: what a client sends, what a server takes, and which of them are good enough for a network.

Invariants: tokens are compared in constant time, all of them whatever the first ones say; a file of tokens is read again
when it changes, so that a token is replaced without a restart; no token is in a repr, a log or an error.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from rlharvest.errors import InvalidField
from rlharvest.tls import Tls

log = structlog.get_logger(__name__)

SHORTEST = 16
"""Characters of a token that may guard an address others can reach."""

_GUESSED = ("rlharvest", "changeme", "change-me", "password", "secret", "token", "admin", "default", "example", "test")


class Tokens:
    """One or several tokens of one role. The first is sent, each of them is taken.

    Args:
        values: the tokens.
        file: holds them instead, one a line; empty lines and lines that start with # are left out. A file that cannot be
            read any more, or holds none, changes nothing.

    Raises:
        ValueError: there is no token.
        OSError: the file cannot be read.
    """

    def __init__(self, values: Sequence[str] = (), *, file: Path | None = None) -> None:
        self.file = file
        self._seen = _stamp(file) if file is not None else None
        self._values = _parse(file.read_text(encoding="utf-8")) if file is not None else [*values]
        if not self._values or not all(self._values):
            raise ValueError(f"{file or 'the setting'} holds no token")

    def __repr__(self) -> str:
        return "Tokens(…)"

    @property
    def values(self) -> list[str]:
        """The tokens as they are now."""
        if self.file is not None:
            try:
                stamp = _stamp(self.file)
                if stamp != self._seen:
                    self._seen = stamp
                    if found := _parse(self.file.read_text(encoding="utf-8")):
                        self._values = found
                        log.info("tokens.read", file=str(self.file), count=len(found))
                    else:
                        log.warning("tokens.none", file=str(self.file))
            except OSError as error:
                if self._seen is not None:  # said once
                    log.warning("tokens.unreadable", file=str(self.file), error=str(error))
                self._seen = None
        return self._values

    @property
    def current(self) -> str:
        """The one to send."""
        return self.values[0]

    def takes(self, given: str) -> bool:
        """Whether `given` is one of them; takes the same time whichever it is."""
        return self.matching(given) is not None

    def matching(self, given: str, form: Callable[[str], str] = str) -> str | None:
        """Return the token of which `given` is this form, None if there is none; takes the same time whichever it is."""
        found = None
        for value in self.values:
            if hmac.compare_digest(given.encode(errors="surrogatepass"), form(value).encode()):
                found = value
        return found


@dataclass(frozen=True)
class Caller:
    """How this process shows itself to a service, and how it knows that service."""

    tokens: Tokens | None = None
    tls: Tls = field(default_factory=Tls)

    @property
    def headers(self) -> dict[str, str]:
        """Of an HTTP request; also the metadata of a gRPC call."""
        return {"authorization": f"Bearer {self.tokens.current}"} if self.tokens is not None else {}


def bearer(header: str) -> str:
    """Return the token of an Authorization header; empty if it has none."""
    scheme, _, given = header.partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def is_loopback(host: str) -> bool:
    """Whether a host name or address is of this machine alone."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def weakness(token: str) -> str | None:
    """Return what is wrong with a token that guards an address others can reach; None: nothing."""
    plain = token.lower().strip("0123456789!?. ")
    if plain in _GUESSED:
        return "it is one that people try first"
    if len(token) < SHORTEST:
        return f"it has fewer than {SHORTEST} characters"
    if len(set(token)) < SHORTEST // 2:
        return "it repeats itself"
    return None


def check_exposure(address_field: str, host: str, token_field: str, tokens: Tokens | None) -> None:
    """Refuse to listen where others can reach it without a token, or with one that can be guessed.

    Args:
        address_field, token_field: names of the settings, e.g. `api_host`, `api_token`.
        host: without the port.

    Raises:
        InvalidField: names the setting and the fix; never the token.
    """
    if is_loopback(host):
        return
    variable = f"RLHARVEST_{token_field.upper()}"
    fix = f"Set {variable} (or {variable}_FILE) to one of `rlharvest secrets DIR`, or listen on 127.0.0.1."
    if tokens is None:
        raise InvalidField(address_field, host, "others can reach this address, and no token is set", fix)
    for value in tokens.values:
        if (problem := weakness(value)) is not None:
            raise InvalidField(token_field, "…", f"others can reach {host}, and the token is weak: {problem}", fix)


def _parse(text: str) -> list[str]:
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _stamp(file: Path) -> tuple[int, int, int]:
    found = os.stat(file)
    return found.st_mtime_ns, found.st_size, found.st_ino
