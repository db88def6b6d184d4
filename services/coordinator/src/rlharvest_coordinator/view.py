"""What the API sees of a coordinator that leads: its jobs, workers and live responses (live.LiveView)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlharvest.errors import NotFound, NotLeader
from rlharvest.fleet.member import ENDED
from rlharvest.ledger.response import FIRST_SERVED
from rlharvest.spans import Finish

from rlharvest_coordinator import live as views
from rlharvest_coordinator.api.resources import sample_resource
from rlharvest_coordinator.keeper import Keeper
from rlharvest_coordinator.records import sample_row
from rlharvest_coordinator.roster import Roster
from rlharvest_coordinator.run import Run


class View:
    """Reads the runs; changes nothing but by asking.

    Args:
        epoch: tells the epoch that this coordinator leads in, 0 if it does not.
        changed: called when a job's row changed.
    """

    def __init__(
        self,
        runs: dict[str, Run],
        keeper: Keeper,
        roster: Roster,
        *,
        epoch: Callable[[], int],
        changed: Callable[[], None],
    ) -> None:
        self.runs = runs
        self.keeper = keeper
        self.roster = roster
        self._epoch = epoch
        self._changed = changed

    @property
    def leading(self) -> bool:
        return self._epoch() > 0

    @property
    def epoch(self) -> int:
        return self._epoch()

    def job(self, job: str) -> views.LiveJob | None:
        run = self.runs.get(job)
        return run.live() if run is not None and not run.closed and job in self.keeper.books else None

    def workers(self) -> list[views.LiveWorker]:
        return [self.roster.live(seat) for seat in self.roster.seats.values()]

    async def drain(self, worker: str, reason: str) -> None:
        seat = self.roster.seats.get(worker)
        if not self.leading:
            raise NotLeader
        if seat is None or seat.member.state in ENDED:
            raise NotFound(f"there is no worker {worker!r} to drain")
        await self.roster.drain(seat, reason)

    async def live_sample(self, job: str, handle: int) -> dict[str, Any] | None:
        run = self.runs.get(job)
        response = run.scope.book.responses.get(handle) if run is not None and not run.closed else None
        if run is None or response is None or handle >= FIRST_SERVED:
            return None
        group = run.scope.book.groups[response.group]
        shown = sample_resource(sample_row(run.scope, group, response), None)
        unknown: dict[str, Any] = {"state": response.state.name.lower()}
        if response.finish is Finish.NONE:
            unknown["finish"] = None
        if response.score is None:
            unknown["reward"] = None
        return shown.model_copy(update=unknown).model_dump()

    async def live_samples(self, job: str, limit: int) -> list[dict[str, Any]]:
        run = self.runs.get(job)
        if run is None or run.closed:
            return []
        trained = (handle for handle in run.scope.book.responses if handle < FIRST_SERVED)
        newest = sorted(trained, reverse=True)[:limit]
        found = [await self.live_sample(job, handle) for handle in newest]
        return [sample for sample in found if sample is not None]

    def wake(self, job: str) -> None:
        self._changed()
