"""Earlier responses to a prompt come back from SQL, and no others."""

from __future__ import annotations

from rlharvest.ids import response_id
from rlharvest.jobs.model import JobSpec
from rlharvest.spans import ids_bytes
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import groups, history, jobs
from rlharvest_coordinator.tables import Group, Sample


async def _record(sessions: Sessions, job: str, ordinal: int, *, prompt: int, epoch: int, rewards: list[float]) -> None:
    group = Group(
        job=job, ordinal=ordinal, state=groups.ACCEPTED, prompt=prompt, data_epoch=epoch, tokens=3, masked=False, at=1.0
    )
    samples = [
        Sample(
            job=job,
            handle=ordinal * 2 + place,
            response_id=response_id(job, ordinal * 2 + place),
            group=ordinal,
            finish="eos",
            ids=ids_bytes([ordinal, place]),
            logprobs=b"\0" * 8,
            runs=[[1, epoch], [1, epoch + 1]],
            pieces=[],
            prompt_text="",
            text="",
            reward=reward,
            components=[],
            at=1.0,
        )
        for place, reward in enumerate(rewards)
    ]
    assert await groups.record(sessions, group, samples, epoch=0)


async def test_past_responses_are_of_these_prompts_and_epochs_the_newest_and_best_first(
    sessions: Sessions, spec: JobSpec
) -> None:
    """Not those of a group that was dropped, nor of another job."""
    job, other = [(await jobs.create(sessions, spec, key=None, now=1.0))[0].id for _ in range(2)]
    await _record(sessions, job, 0, prompt=7, epoch=0, rewards=[0.0, 1.0])
    await _record(sessions, job, 1, prompt=7, epoch=1, rewards=[0.5, 0.0])
    await _record(sessions, job, 2, prompt=7, epoch=2, rewards=[1.0, 1.0])
    await _record(sessions, job, 3, prompt=8, epoch=1, rewards=[1.0, 1.0])
    await _record(sessions, job, 4, prompt=9, epoch=1, rewards=[1.0, 1.0])
    await _record(sessions, job, 5, prompt=7, epoch=1, rewards=[1.0, 1.0])
    await groups.drop(sessions, job, [5], "test", epoch=0)
    await _record(sessions, other, 0, prompt=7, epoch=1, rewards=[1.0])
    found = await history.past(sessions, job, {7, 8}, first_epoch=0, below_epoch=2)
    assert [(one.prompt, one.epoch, one.reward) for one in found] == [
        (8, 1, 1.0),
        (8, 1, 1.0),
        (7, 1, 0.5),
        (7, 1, 0.0),
        (7, 0, 1.0),
        (7, 0, 0.0),
    ]
    assert (found[2].ids, found[2].version) == (ids_bytes([1, 0]), 2)
    newest = await history.past(sessions, job, [7], first_epoch=2, below_epoch=9)
    assert [one.epoch for one in newest] == [2, 2]
