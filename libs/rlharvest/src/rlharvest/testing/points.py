"""Where a worker can die: the traps (rlharvest.testing.faults) of every stage of its life, by name.

They name functions of the rollout service. One that is renamed there makes the trap an error at the worker's start, so
this list cannot fall behind in silence.
"""

from __future__ import annotations

_W = "rlharvest_rollout.worker:Worker"
_F = "rlharvest_rollout.fleet:Fleet"
_S = "rlharvest_rollout.session:Session"
_P = "rlharvest_rollout.publisher:Publisher"
_B = "rlharvest_rollout.buffer:Buffer"
_E = "rlharvest.testing.stub:StubEngine"
_SENT = "nats.aio.transport:TcpTransport.drain"
"""Bytes have been handed to the system; nothing has been heard of them."""

JOINING = {
    "connected, not registered": f"kill before {_W}.start",
    "while it registers": f"kill before {_F}.register",
    "registered, never heard of": f"kill after {_F}.register",
    "at its first heartbeat": f"kill after {_W}._heartbeat",
}

WARMING = {
    "when its lease comes": f"kill before {_W}._on_lease",
    "before its engine starts": f"kill before {_S}.start",
    "with the manifest, before the files": "kill after rlharvest.weights.catalog:fetch_manifest",
    "downloading, with a part verified": "kill after rlharvest.weights.download:Download.part",
    "downloaded, not assembled": "kill before rlharvest.weights.puller:_Pull._assemble",
    "loading": f"kill before {_E}.load",
    "loaded, idle and ready": f"kill after {_S}._concluded",
}

GENERATING = {
    "when its first assignment comes": f"kill before {_S}.assign",
    "assignment taken, not answered": f"kill after {_S}.assign",
    "mid-span, before the flush": f"kill before {_P}._publish@3",
    "between publish and PubAck": f"kill after {_P}._deliver@3 > {_SENT}",
    "PubAck come, not noted": f"kill before {_B}.confirm@3",
    "after the PubAck, before the LedgerAck": f"kill after {_B}.confirm@3",
    "when a LedgerAck comes": f"kill before {_S}.acknowledge@2",
    "after the last token, before its flush": f"kill before {_E}._finish > {_P}._publish",
    "last token published, no PubAck": f"kill after {_E}._finish > {_P}._deliver > {_SENT}",
    "last token durable, no LedgerAck": f"kill after {_E}._finish > {_P}._deliver > {_B}.confirm",
}

DRAINING = {
    "draining, before the last flush": f"kill before {_P}.finish",
    "draining, last flush without PubAck": f"kill after {_P}.finish > {_P}._deliver > {_SENT}",
    "draining, everything durable, not left": f"kill before {_F}.leave",
}
"""After a SIGTERM."""

FOLLOWING = {
    "told of a new version": f"kill after {_S}.follow",
    "before the files of a new version": "kill before rlharvest_rollout.versions:PulledVersions.bring@2",
    "loading a new version": f"kill before {_E}.load@2",
}

CONTINUING = {
    "before it asks for a prefix": f"kill before {_F}.get_prefix",
    "with a prefix, before it goes on": f"kill after {_F}.get_prefix",
}
"""Where it gets a started response whose tokens do not fit into the assignment."""

INLINE_LITTLE = "set rlharvest_coordinator.courier:INLINE_BYTES 40"
"""For the coordinator: a response of more than a few tokens is continued by reference."""
