"""The process that runs one reward function: `python -I -m rlharvest_reward.child <descriptor> <parent's id>`.

It reads one frame with what to load, answers it, then scores a frame at a time until the stream ends. It has a session,
an empty directory and a memory limit of its own, no credentials in its environment, and dies with the service. Time is
the parent's business. What the function prints goes to the parent's bounded log, not to the frames.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from rlharvest_reward import frames, limits
from rlharvest_reward.fault import RewardFault
from rlharvest_reward.functions import Function


def _fault(fault: RewardFault) -> dict[str, Any]:
    return {"kind": fault.kind, "message": str(fault), "function": fault.function}


def _loaded(spec: dict[str, Any]) -> tuple[Function | None, dict[str, Any]]:
    try:
        return Function(spec), {"loaded": True}
    except RewardFault as fault:
        return None, {"fault": _fault(fault)}
    except MemoryError:
        label = spec["builtin"] or spec["name"]
        message = f"{spec['memory_mb']} MB are too little to load {label}. Raise memory_mb"
        return None, {"fault": {"kind": "memory", "message": message, "function": label}}


def _scored(function: Function, sample: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": function.score(sample)}
    except RewardFault as fault:
        return {"fault": _fault(fault)}


def main(descriptor: int, parent: int) -> None:
    """Serve frames on a connected socket until the other side closes it."""
    limits.die_with_parent(parent)
    limits.adopt_orphans()
    own = os.getpid()
    connection = socket.socket(fileno=descriptor)
    spec = frames.receive(connection)
    if spec is None:
        return
    limits.confine(spec["memory_mb"])
    function, answer = _loaded(spec)
    while True:
        if os.getpid() != own:
            os._exit(0)  # a fork inside the user's function came back from it: it must not answer a second time
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(frames.encode(answer))
        if function is None:
            return
        sample = frames.receive(connection)
        if sample is None:
            return
        answer = _scored(function, sample)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
