"""SIGKILL at any instant: the next trainer goes on to the very same weights."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import trainer_process
from rlharvest.testing.batches import ScriptedCoordinator
from rlharvest.v1 import batches_pb2

Scripted = Callable[..., ScriptedCoordinator]
Training = Callable[[ScriptedCoordinator], Any]
Start = Callable[[str, Path], BaseProcess]
STEPS = 6


@pytest.fixture(scope="module")
def start() -> Callable[[str, Path], BaseProcess]:
    """Return a starter of trainer processes: forked from one that has torch imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainer_process", "transformers.models.llama.modeling_llama"])

    def one(address: str, directory: Path) -> BaseProcess:
        process = context.Process(target=trainer_process.main, args=(address, str(directory)), daemon=True)
        process.start()
        return process

    return one


async def stop(process: BaseProcess) -> None:
    """SIGTERM it; it must leave by itself, with 0."""
    process.terminate()
    await asyncio.to_thread(process.join, 30)
    assert process.exitcode == 0


async def run(
    start: Start, coordinator: ScriptedCoordinator, directory: Path, kills: list[Callable[[ScriptedCoordinator], bool]]
) -> None:
    """Train to the end, killing the trainer each time a condition holds."""
    address = await coordinator.start()
    process = start(address, directory)
    try:
        for condition in kills:
            await coordinator.until(condition, timeout_s=150)
            process.kill()
            process.join()
            coordinator.open = True
            process = start(address, directory)
        await coordinator.until(lambda it: bool(it.outcomes), timeout_s=150)
        await stop(process)
    finally:
        process.kill()
        process.join()
        await coordinator.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_kill_in_a_step_and_one_in_a_save_change_no_digest(
    scripted: Scripted, training: Training, start: Start, tmp_path: Path
) -> None:
    whole = scripted(steps=STEPS, every=2)
    whole.checkpoint_dir = tmp_path / "whole"
    async with training(whole):
        await whole.until(lambda it: bool(it.outcomes))

    directory = tmp_path / "killed"
    directory.mkdir()
    killed = scripted(steps=STEPS, every=2)
    killed.checkpoint_dir = directory / "ckpt"
    saving = killed.checkpoint_dir / ".writing_4_2"

    def in_a_step(it: ScriptedCoordinator) -> bool:
        return any(step == 3 for _, step, _ in it.asked)

    def in_a_save(_: ScriptedCoordinator) -> bool:
        return saving.exists() or (killed.checkpoint_dir / "step_4").exists()

    await run(start, killed, directory, [in_a_step, in_a_save])
    assert killed.digests() == whole.digests()
    assert killed.outcomes == [(batches_pb2.OUTCOME_SUCCEEDED, "")]
    for fence in (2, 3):
        asked = sorted({step for number, step, _ in killed.asked if number == fence})
        assert asked == list(range(asked[0], asked[-1] + 1)), "no batch is skipped"
        assert asked[0] in {2, 4}, "from the newest checkpoint on"
    assert not list(killed.checkpoint_dir.glob(".writing_*"))


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_sigterm_in_the_middle_of_a_batch_saves_releases_and_exits_with_0(
    scripted: Scripted, start: Start, tmp_path: Path
) -> None:
    coordinator = scripted(steps=STEPS, every=100)
    coordinator.visible = {3: 1}
    address = await coordinator.start()
    process = start(address, tmp_path)
    try:
        await coordinator.until(lambda it: 3 in it.steps, timeout_s=150)
        await stop(process)
    finally:
        process.kill()
        process.join()
        await coordinator.close()
    assert coordinator.outcomes == [(batches_pb2.OUTCOME_RELEASED, "")]
    assert [saved.step for saved in coordinator.checkpoints] == [3]
