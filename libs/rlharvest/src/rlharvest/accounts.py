"""NATS accounts: the signed statements (JWT) by which a NATS server knows its users and what each may do.

Decentralised authentication as NATS defines it (JWT version 2, nkeys): the server's configuration names one account; whoever
holds the account's seed can sign credentials of users, offline, with the permissions in them. Services get theirs when the
secrets are made; a worker gets its own from the coordinator, under a name that is bound to a key it made itself.

Invariants: a worker's name is a hash of its public key, so the credential of a name is of no use to who does not hold that
key; the key that signs the account is thrown away at once, so the account's permissions stay as they were written.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import nkeys  # type: ignore[import-untyped]  # it has no types
from nacl.exceptions import CryptoError
from nacl.signing import VerifyKey

from rlharvest import ids
from rlharvest.errors import DataError
from rlharvest.grants import Grant, inbox

_PREFIXES = {
    "operator": nkeys.PREFIX_BYTE_OPERATOR,
    "account": nkeys.PREFIX_BYTE_ACCOUNT,
    "user": nkeys.PREFIX_BYTE_USER,
}
_ANSWER_NS = 60_000_000_000
"""How long a request may be answered."""

_LIMITS = {"subs": -1, "data": -1, "payload": -1}


class BadCredential(DataError):
    """This is no credential of a NATS user: a JWT and the seed of its key."""


def new_seed(kind: Literal["operator", "account", "user"]) -> str:
    """Return a new secret key in NATS's text form."""
    return str(nkeys.encode_seed(os.urandom(32), _PREFIXES[kind]).decode())


def public_key(seed: str) -> str:
    """Return the public key of a seed."""
    return str(nkeys.from_seed(bytearray(seed.encode())).public_key.decode())


def sign(seed: str, data: bytes) -> bytes:
    """Return the Ed25519 signature of `data`."""
    return bytes(nkeys.from_seed(bytearray(seed.encode())).sign(data))


@dataclass
class Credential:
    """What a client shows to a NATS server."""

    jwt: str
    """Says who it is and what it may do; may be replaced by a newer one of the same key."""
    seed: str = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Credential:
        """Read NATS's file format of credentials.

        Raises:
            BadCredential: it is something else.
        """
        found = re.findall(r"-----BEGIN [A-Z ]+-----\s*(\S+)\s*------END [A-Z ]+------", text)
        if len(found) != 2:
            raise BadCredential
        return cls(found[0], found[1])

    def text(self) -> str:
        """Return NATS's file format of it."""
        return (
            f"-----BEGIN NATS USER JWT-----\n{self.jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{self.seed}\n------END USER NKEY SEED------\n"
        )

    @property
    def name(self) -> str:
        """Of the user, as the JWT has it."""
        return str(_claims(self.jwt)["name"])

    @property
    def inbox(self) -> str:
        """Prefix of the subjects on which it may hear replies."""
        return inbox(self.name)

    def answer(self, nonce: str) -> bytes:
        """Return the proof that a server asks for: that this client holds the key."""
        return base64.b64encode(sign(self.seed, nonce.encode()))


class Account:
    """The account that all of rlharvest is in; holds the seed, so it may sign users.

    Raises:
        BadCredential: the seed is none.
    """

    def __init__(self, seed: str) -> None:
        try:
            self.public = public_key(seed)
        except Exception as error:  # whatever nkeys makes of bytes that are no seed
            raise BadCredential("this is no seed of a NATS account; `rlharvest secrets DIR` makes one") from error
        self._seed = seed

    def user(self, name: str, key: str, given: Grant, *, seconds: float | None = None) -> str:
        """Return a signed JWT of a user.

        Args:
            key: its public key.
            seconds: how long it is good for; None: for ever.
        """
        claims: dict[str, Any] = {
            "pub": {"allow": list(given.publish)},
            "sub": {"allow": list(given.subscribe)},
            **({"resp": {"max": 1, "ttl": _ANSWER_NS}} if given.answers else {}),
            **_LIMITS,
            "type": "user",
            "version": 2,
        }
        return _signed(self._seed, self.public, key, name, claims, seconds=seconds)

    def credential(self, name: str, given: Grant) -> Credential:
        """Return a credential with a key of its own."""
        seed = new_seed("user")
        return Credential(self.user(name, public_key(seed), given), seed)

    def worker_of(self, jwt: str) -> str | None:
        """Return the name of the worker whose JWT this is; None if this account did not sign it, or it is over."""
        head, _, signature = jwt.rpartition(".")
        try:
            claims = _claims(jwt)
            nkeys.from_seed(bytearray(self._seed.encode())).verify(head.encode(), _unbase64(signature))
        except (DataError, nkeys.NkeysError, ValueError):
            return None
        if claims.get("iss") != self.public or claims.get("exp", 2**63) < time.time():
            return None
        name = claims.get("name")
        return name if isinstance(name, str) and name.startswith("wkr_") else None

    def server_config(self) -> str:
        """Return the part of a NATS server's configuration that knows this account and no other user.

        The operator that vouches for it is made here and forgotten: a new one at every call, which changes nothing for
        the users.
        """
        operator = new_seed("operator")
        issuer = public_key(operator)
        system = public_key(new_seed("account"))
        limits = {
            **_LIMITS,
            **{"imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": 0},
            **{"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1},
        }
        rlharvest = _signed(
            operator, issuer, self.public, "rlharvest", {"limits": limits, "type": "account", "version": 2}
        )
        monitoring = {"limits": {**limits, "mem_storage": 0, "disk_storage": 0}, "type": "account", "version": 2}
        return (
            "# Made by `rlharvest secrets`. Nobody is let in without a credential that the account rlharvest signed.\n"
            f"operator: {_signed(operator, issuer, issuer, 'rlharvest', {'type': 'operator', 'version': 2})}\n"
            f"system_account: {system}\n"
            "resolver: MEMORY\n"
            "resolver_preload: {\n"
            f"  {self.public}: {rlharvest}\n"
            f"  {system}: {_signed(operator, issuer, system, 'system', monitoring)}\n"
            "}\n"
        )


class Candidate:
    """A worker before it is known: a key of its own, and the name that follows from it."""

    def __init__(self) -> None:
        self.seed = new_seed("user")
        self.key = public_key(self.seed)
        self.name = _named(ids.new_id("wkr"), self.key)

    @property
    def proof(self) -> bytes:
        """That it holds the key; the coordinator alone sees it."""
        return sign(self.seed, _statement(self.name))


def owns(name: str, key: str, proof: bytes) -> bool:
    """Whether who gave `proof` holds the key, and the name is the key's."""
    if not name.startswith("wkr_") or name != _named(name, key):
        return False
    try:
        raw = base64.b32decode(key + "=" * (-len(key) % 8))
        if len(raw) != 35 or raw[0] != nkeys.PREFIX_BYTE_USER:
            return False
        VerifyKey(raw[1:33]).verify(_statement(name), proof)
    except (ValueError, CryptoError):
        return False
    return True


def _statement(name: str) -> bytes:
    return b"rlharvest: I am worker " + name.encode()


def _named(name: str, key: str) -> str:
    """Return a worker's name with its random part replaced by a hash of the key and of its time."""
    begin = name[: len("wkr_") + 10]
    number = int.from_bytes(hashlib.sha256(f"{begin} {key}".encode(errors="surrogatepass")).digest()[:10], "big")
    return begin + ids.encode(number, 16)


def _signed(
    seed: str, issuer: str, key: str, name: str, claims: dict[str, Any], *, seconds: float | None = None
) -> str:
    now = time.time()
    body: dict[str, Any] = {"iat": int(now), "iss": issuer, "name": name, "sub": key, "nats": claims}
    if seconds is not None:
        body["exp"] = int(now + seconds)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
    body["jti"] = base64.b32encode(digest).decode().rstrip("=")
    head = f"{_base64(json.dumps({'typ': 'JWT', 'alg': 'ed25519-nkey'}))}.{_base64(json.dumps(body))}"
    return f"{head}.{base64.urlsafe_b64encode(sign(seed, head.encode())).decode().rstrip('=')}"


def _claims(jwt: str) -> dict[str, Any]:
    parts = jwt.split(".")
    try:
        claims = json.loads(_unbase64(parts[1]))
    except (IndexError, ValueError) as error:
        raise BadCredential from error
    if not isinstance(claims, dict) or "name" not in claims:
        raise BadCredential
    return claims


def _base64(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _unbase64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
