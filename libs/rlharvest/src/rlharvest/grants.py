"""Who may say what on NATS: for every role the subjects it may publish and subscribe to, and the JetStream API it may use.

Pure. The table names sender and receiver of each kind of message; everything else follows from it, so that the server's
permissions cannot drift from the code. Invariants: a worker publishes under its own name only, hears only what is sent to
its name (and the broadcasts `resend` and `version`), and has no JetStream API at all; replies reach only the inbox of who
asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlharvest.bus import SCORES, STREAMS, Kind, subject

Role = Literal["coordinator", "reward", "trainer", "weights", "worker"]
SERVICES: tuple[Literal["coordinator", "reward", "trainer", "weights"], ...] = (
    "coordinator",
    "reward",
    "trainer",
    "weights",
)
"""Who has a credential from the start; workers get theirs from the coordinator."""

ROLES: tuple[Role, ...] = (*SERVICES, "worker")

REWARD_CONSUMER = "reward"
"""Name of the consumer with which reward services share the queue of scores."""


@dataclass(frozen=True)
class Route:
    """One kind of message."""

    senders: tuple[Role, ...]
    receivers: tuple[Role, ...] = ()
    """Who subscribes; who reads through a stream needs the stream's API instead."""
    names: Literal["sender", "receiver"] = "sender"
    """Whose name ends the subject."""


ROUTES: dict[Kind, Route] = {
    "spans": Route(("worker",)),
    "ledger": Route(("coordinator",)),
    "score": Route(("coordinator",), names="receiver"),
    "scored": Route(("reward",)),
    "events": Route(ROLES),
    "groups": Route(("coordinator",), ("trainer",)),
    "acks": Route(("coordinator",), ("worker",), "receiver"),
    "resend": Route(("coordinator",), ("worker",)),
    "lease": Route(("coordinator",), ("worker",), "receiver"),
    "assign": Route(("coordinator",), ("worker",), "receiver"),
    "abort": Route(("coordinator",), ("worker",), "receiver"),
    "rejoin": Route(("coordinator",), ("worker",), "receiver"),
    "drain": Route(("coordinator",), ("worker",), "receiver"),
    "beat": Route(("worker",), ("coordinator",)),
    "version": Route(("weights",), ("coordinator", "worker")),
}

_ASKED: tuple[Kind, ...] = ("lease", "assign")
"""Kinds that are requests: their receivers may answer."""


@dataclass(frozen=True)
class Grant:
    """What one client may do; subjects with NATS's wildcards."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False
    """Whether it may publish once to the reply subject of a message that it received."""


def grant(role: Role, name: str) -> Grant:
    """Return what a client of this role may do.

    Args:
        name: ends the subjects that it owns: the worker's id, the role's name for services. Trainers, which are trusted
            and choose their names, share one grant.
    """
    own = "*" if role == "trainer" else name
    publish = [
        subject(kind, "*", own if route.names == "sender" else "*")
        for kind, route in ROUTES.items()
        if role in route.senders
    ]
    subscribe = [subject(kind, "*", _receives(route, own)) for kind, route in ROUTES.items() if role in route.receivers]
    asked = any(role in ROUTES[kind].receivers for kind in _ASKED)
    return Grant((*publish, *_api(role)), (*subscribe, f"{inbox(name)}.>"), answers=asked)


def inbox(name: str) -> str:
    """Return the prefix of the subjects on which a client hears replies; nobody else may subscribe there."""
    return f"_INBOX.{name}"


def _receives(route: Route, name: str) -> str:
    if route.names == "receiver":
        return name
    only = route.senders[0]
    return only if len(route.senders) == 1 and only in ("coordinator", "weights") else "*"


def _api(role: Role) -> tuple[str, ...]:
    """Return the subjects of JetStream's API that a role may use."""
    if role == "coordinator":
        return ("$JS.API.>", "$JS.ACK.>", "$JS.FC.>")  # the streams are its own
    if role == "reward":
        streams = [f"$JS.API.STREAM.{verb}.{name}" for verb in ("INFO", "CREATE") for name in STREAMS]
        consumer = f"{SCORES}.{REWARD_CONSUMER}"
        return (
            *streams,
            f"$JS.API.CONSUMER.INFO.{consumer}",
            f"$JS.API.CONSUMER.DURABLE.CREATE.{consumer}",
            f"$JS.API.CONSUMER.CREATE.{consumer}",
            f"$JS.API.CONSUMER.CREATE.{consumer}.>",
            f"$JS.API.CONSUMER.MSG.NEXT.{consumer}",
            f"$JS.ACK.{consumer}.>",
        )
    return ()
