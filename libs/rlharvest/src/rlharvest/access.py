"""Who may call what: the roles of callers, and the rule for every gRPC method and HTTP path of rlharvest's own servers.

No I/O. Invariants: a server without any token takes everybody (it listens on loopback, see credentials.check_exposure); with
one, a method that is not in the table is refused to all; health and reflection are open, since they say nothing of jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlharvest.credentials import Tokens

Role = Literal["api", "worker", "service"]
"""api: people and programs that submit jobs. worker: a rollout worker. service: trainers and the other services."""

METHODS: dict[str, frozenset[Role]] = {
    "/rlharvest.v1.Fleet/Admit": frozenset({"worker"}),
    "/rlharvest.v1.Fleet/Register": frozenset({"worker"}),
    "/rlharvest.v1.Fleet/Leave": frozenset({"worker"}),
    "/rlharvest.v1.Fleet/GetPrefix": frozenset({"worker"}),
    "/rlharvest.v1.Fleet/GetDrafts": frozenset({"worker"}),
    "/rlharvest.v1.Batches/Claim": frozenset({"service"}),
    "/rlharvest.v1.Batches/Renew": frozenset({"service"}),
    "/rlharvest.v1.Batches/NextBatch": frozenset({"service"}),
    "/rlharvest.v1.Batches/ReportStep": frozenset({"service"}),
    "/rlharvest.v1.Batches/ReportCheckpoint": frozenset({"service"}),
    "/rlharvest.v1.Batches/Finish": frozenset({"service"}),
    "/rlharvest.v1.Jobs/Create": frozenset({"api"}),
    "/rlharvest.v1.Jobs/Get": frozenset({"api"}),
    "/rlharvest.v1.Jobs/List": frozenset({"api"}),
    "/rlharvest.v1.Jobs/Cancel": frozenset({"api"}),
    "/rlharvest.v1.Jobs/Pause": frozenset({"api"}),
    "/rlharvest.v1.Jobs/Resume": frozenset({"api"}),
    "/rlharvest.v1.Weights/Begin": frozenset({"service"}),
    "/rlharvest.v1.Weights/Publish": frozenset({"service"}),
    "/rlharvest.v1.Weights/List": frozenset({"service", "worker"}),
    "/rlharvest.v1.Weights/Retain": frozenset({"service"}),
    "/rlharvest.v1.Weights/Forget": frozenset({"service"}),
}

OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")
OPEN_PATHS = ("/livez", "/readyz", "/metrics")
JOINING = "/rlharvest.v1.Fleet/Admit"
"""The one method of Fleet that a worker calls before it has proved a name of its own."""


@dataclass(frozen=True)
class Peer:
    """Who calls."""

    role: Role
    worker: str | None = None
    """The worker that it proved to be."""


@dataclass(frozen=True)
class Verdict:
    """Why a call is refused: `unknown` (no valid token) or `forbidden` (not for this role)."""

    kind: Literal["unknown", "forbidden"]
    message: str


@dataclass(frozen=True)
class Access:
    """Whom one server takes.

    Attributes:
        tokens: of each role; none at all: everybody is taken.
        identify: returns the worker whose credential is given, None if it is none of ours. Once it is set, a worker may
            call methods of Fleet only in its own name.
    """

    tokens: Mapping[Role, Tokens] = field(default_factory=dict)
    identify: Callable[[str], str | None] | None = None

    def peer(self, given: str) -> Peer | None:
        """Return who sent this token; None: nobody that is known."""
        found: Peer | None = None
        for role, tokens in self.tokens.items():
            if tokens.takes(given):
                found = Peer(role)
        if found is None and self.identify is not None and (worker := self.identify(given)) is not None:
            found = Peer("worker", worker)
        return found

    def method(self, name: str, given: str) -> Verdict | None:
        """Judge a gRPC call before its message is read; None: it may go on.

        Args:
            name: full name of the method, `/package.Service/Method`.
            given: its token, empty if it has none.
        """
        if not self.tokens or name.startswith(OPEN_SERVICES):
            return None
        peer = self.peer(given)
        if peer is None:
            return _UNKNOWN
        if peer.role not in METHODS.get(name, frozenset()):
            return Verdict("forbidden", f"{name} is not for the role {peer.role}")
        if peer.worker is None and self._as_itself(name):
            return Verdict("forbidden", f"{name} needs the credential that Fleet.Admit gives")
        return None

    def speaks(self, name: str, given: str, worker: str) -> Verdict | None:
        """Judge a message that names the worker that sends it; None: it is that worker."""
        if not self.tokens or not self._as_itself(name):
            return None
        peer = self.peer(given)
        if peer is None or peer.worker != worker:
            return Verdict("forbidden", f"this credential is not of worker {worker!r}")
        return None

    def _as_itself(self, method: str) -> bool:
        return self.identify is not None and method.startswith("/rlharvest.v1.Fleet/") and method != JOINING

    def http(self, method: str, path: str, given: str) -> Verdict | None:
        """Judge a request to the weight service: services write, workers read too; None: it may go on."""
        if not self.tokens or path in OPEN_PATHS:
            return None
        peer = self.peer(given)
        if peer is None:
            return _UNKNOWN
        allowed: tuple[Role, ...] = ("service", "worker") if method in ("GET", "HEAD") else ("service",)
        if peer.role not in allowed:
            return Verdict("forbidden", f"{method} is not for the role {peer.role}")
        return None


_UNKNOWN = Verdict("unknown", "A token is needed: send it as `authorization: Bearer <token>`.")
