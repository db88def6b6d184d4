"""A worker's part: starts an engine on the model of a directory, prints the ids of its processes, and waits."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rlharvest.engine import EngineConfig
from rlharvest_rollout.engines.vllm.process import EngineProcess, this_machine


async def own(directory: Path) -> None:
    machine = this_machine(threads=1, slots=4, kv_memory_bytes=1 << 26)
    process = await EngineProcess.start(EngineConfig(slots=4, context=64, options={}), machine, directory)
    ids = {pid for pids in await process.call("guard_processes") for pid in pids}
    print("engine", *ids, flush=True)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(own(Path(sys.argv[1])))
