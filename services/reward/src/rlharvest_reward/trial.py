"""Which promises of the sandbox hold on this machine, found out by trying to break them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rlharvest.errors import InvalidField

from rlharvest_reward import escape
from rlharvest_reward.fault import RewardFault
from rlharvest_reward.process import RewardProcess
from rlharvest_reward.sandbox import Sandbox

_MEMORY_MB = 1024
_TIMEOUT_S = 60.0


async def broken(sandbox: Sandbox) -> list[str]:
    """Return what reward code could do here and must not: names of escape.BREACHES.

    Raises:
        InvalidField: a wall is required and cannot be built, or does not hold; says which, and what to do.
    """
    with tempfile.TemporaryDirectory(prefix="rlharvest-outside-") as outside:
        _furnish(Path(outside))
        try:
            found = await _escape(sandbox, outside)
        except RewardFault as fault:
            raise _refusal(str(fault)) from fault
    if found and sandbox.required:
        raise _refusal(f"reward code gets through: {', '.join(found)}")
    return found


def _furnish(outside: Path) -> None:
    outside.chmod(0o777)
    (outside / "secret").write_text("secret")
    (outside / "secret").chmod(0o666)


async def _escape(sandbox: Sandbox, outside: str) -> list[str]:
    spec = {
        "style": "verl",
        "builtin": None,
        "path": escape.__file__,
        "name": "escape",
        "params": {"service": os.getpid(), "outside": outside},
        "memory_mb": _MEMORY_MB,
    }
    sample = {"prompt": "", "completion": "", "completion_ids": [], "columns": {}, "step": 0}
    process = await RewardProcess.start(spec, sandbox=sandbox, load_timeout_s=_TIMEOUT_S)
    try:
        score = int(await process.score(sample, _TIMEOUT_S) or 0)
    finally:
        await process.close()
    return [name for name, breach in escape.BREACHES.items() if score & breach]


def _refusal(problem: str) -> InvalidField:
    return InvalidField(
        "RLHARVEST_REWARD_SANDBOX",
        "required",
        problem,
        "The sandbox needs Linux 5.13 or newer with Landlock switched on, and libseccomp 2 (Debian: libseccomp2). Run only "
        "rewards that you trust and set best_effort to do without what is missing.",
    )
