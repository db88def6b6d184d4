"""What a worker may say of itself when it joins: pure checks, before any of it reaches SQL or a subject.

Invariants: a name that was accepted is a token of a subject, so it can be written to; numbers fit the columns of every
database; texts are short and printable.
"""

from __future__ import annotations

from rlharvest.bus import names_one
from rlharvest.errors import InvalidField
from rlharvest.v1 import fleet_pb2

MAX_SLOTS = 65_536
MAX_PID = 2**31 - 1
MAX_ENGINES = 16
MAX_TEXT = 500
"""Characters."""


def check(request: fleet_pb2.RegisterRequest) -> None:
    """Look at a request to join. Raises InvalidField."""
    if not names_one(request.worker):
        raise InvalidField(
            "worker", request.worker, "not a worker's name", "Use letters, digits, '_' and '-', at most 100."
        )
    if request.slots > MAX_SLOTS:
        raise InvalidField("slots", request.slots, "too many", f"Set RLHARVEST_SLOTS to at most {MAX_SLOTS}.")
    if request.pid > MAX_PID:
        raise InvalidField("pid", request.pid, "not a process id", f"Send at most {MAX_PID}.")
    if len(request.engines) > MAX_ENGINES:
        raise InvalidField("engines", len(request.engines), "too many", f"Offer at most {MAX_ENGINES}.")
    texts = [(name, getattr(request, name)) for name in ("hostname", "numerics_key", "build", "worker_type")]
    for name, text in [*texts, *(("engines", engine) for engine in request.engines)]:
        if len(text) > MAX_TEXT or not text.isprintable():
            raise InvalidField(name, text, "not a printable line", f"Use at most {MAX_TEXT} printable characters.")
