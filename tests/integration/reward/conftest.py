"""A reward function in a real child process, from its source text."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rlharvest_reward.process import RewardProcess
from rlharvest_reward.sandbox import Sandbox

SANDBOX = Sandbox(roots=())

Start = Callable[..., Awaitable[RewardProcess]]


def sample(**changes: Any) -> dict[str, Any]:
    return {
        "prompt": "2 + 2 = ",
        "prompt_text": "2 + 2 = ",
        "completion": "4",
        "completion_ids": [7],
        "columns": {"ground_truth": "4", "data_source": "sums", "extra_info": {"index": 3}, "level": 2},
        "truncated": False,
        "step": 5,
        **changes,
    }


def spec_of(path: Path) -> dict[str, Any]:
    return {
        "style": "auto",
        "builtin": None,
        "path": str(path),
        "name": "compute_score",
        "params": {},
        "memory_mb": 512,
    }


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start a process from source text; it is closed at the end, and nothing of its session may be left."""
    started: list[RewardProcess] = []

    async def begin(source: str, sandbox: Sandbox = SANDBOX, **changes: Any) -> RewardProcess:
        path = tmp_path / "rewards" / "rewards.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        process = await RewardProcess.start({**spec_of(path), **changes}, sandbox=sandbox, load_timeout_s=30)
        started.append(process)
        return process

    yield begin
    for process in started:
        await process.close()
        assert survivors(process.pid) == []


def survivors(session: int) -> list[int]:
    """Processes of a session that still run."""
    left = []
    for each in psutil.process_iter(["status"]):
        try:
            if os.getsid(each.pid) == session and each.info["status"] != psutil.STATUS_ZOMBIE:
                left.append(each.pid)
        except ProcessLookupError:
            continue
    return left


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def until(condition: Callable[[], bool], seconds: float = 5) -> None:
    """Wait until a condition holds; fail after so many seconds."""
    for _ in range(int(seconds * 100)):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("the condition did not come true")
