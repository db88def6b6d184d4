"""The process that runs one reward function: `python -I -m rlharvest_reward.child <descriptor> <parent's id>`.

It enters the sandbox that the first frame describes, loads what the second one names, then scores a frame at a time until
the stream ends; each frame has the name of a call, which the answer repeats. It has a session, an empty directory and
limits of its own, no credentials in its environment, and dies with the service. Time is the parent's business, and so is
the sum of what it uses. What the function prints goes to the parent's bounded log, not to the frames.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from rlharvest_reward import frames, limits
from rlharvest_reward.fault import RewardFault, shorten
from rlharvest_reward.functions import Function
from rlharvest_reward.sandbox import Sandbox


def _fault(fault: RewardFault) -> dict[str, Any]:
    return {"fault": {"kind": fault.kind, "message": str(fault), "function": shorten(fault.function, 200)}}


def _entered(frame: dict[str, Any], parent: int) -> dict[str, Any]:
    try:
        walls = Sandbox.of(frame["sandbox"]).enter(parent, frame["memory_mb"], frame["file"])
    except OSError as error:
        return _fault(RewardFault("crashed", f"the sandbox of reward functions cannot be built: {error}"))
    return {"walls": walls}


def _loaded(spec: dict[str, Any]) -> tuple[Function | None, dict[str, Any]]:
    try:
        return Function(spec), {}
    except RewardFault as fault:
        return None, _fault(fault)
    except MemoryError:
        label = spec["builtin"] or spec["name"]
        message = f"{spec['memory_mb']} MB are too little to load {label}. Raise memory_mb"
        return None, _fault(RewardFault("memory", message, function=label))


def _scored(function: Function, sample: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": function.score(sample)}
    except RewardFault as fault:
        return _fault(fault)


def main(descriptor: int, parent: int) -> None:
    """Serve frames on a connected socket until the other side closes it."""
    limits.die_with_parent(parent)
    limits.adopt_orphans()
    own = os.getpid()
    connection = socket.socket(fileno=descriptor)
    function: Function | None = None
    while (frame := frames.receive(connection)) is not None:
        if "sandbox" in frame:
            answer = _entered(frame, parent)
        elif "load" in frame:
            function, answer = _loaded(frame["load"])
        else:
            assert function is not None
            answer = _scored(function, frame["sample"])
        if os.getpid() != own:
            os._exit(0)  # a fork inside the user's function came back from it: it must not answer a second time
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(frames.encode({"call": frame["call"], **answer}))
        if "fault" in answer and function is None:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
