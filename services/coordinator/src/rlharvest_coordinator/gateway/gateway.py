"""Which job a request is for, and how much may be sampled at a time."""

from __future__ import annotations

from collections.abc import Callable

from rlharvest.errors import InvalidField, LimitReached, NotFound, NotLeader, Unavailable
from rlharvest.jobs.state import TERMINAL, Status

from rlharvest_coordinator.gateway.completion import Completion
from rlharvest_coordinator.gateway.request import Ask, Order
from rlharvest_coordinator.run import Run
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import jobs
from rlharvest_coordinator.tables import Job


class Gateway:
    """The completions of one coordinator.

    Args:
        runs: by job.
        epoch: tells the epoch that this coordinator leads in, 0 if it does not.
        most: responses that may be sampled at a time.
    """

    def __init__(self, runs: dict[str, Run], sessions: Sessions, *, epoch: Callable[[], int], most: int) -> None:
        self.runs = runs
        self.sessions = sessions
        self.most = most
        self.sampling = 0
        """Responses that are being sampled for clients."""
        self._epoch = epoch

    def serving(self) -> list[Run]:
        """Return the runs that serve, oldest first. Raises NotLeader."""
        if not self._epoch():
            raise NotLeader
        found = [run for run in self.runs.values() if run.scope.status is Status.RUNNING and not run.closed]
        return sorted(found, key=lambda run: run.scope.row.created_at)

    async def job(self, model: str) -> Run:
        """Return the run that a request is for, by the id or the name of its job.

        Raises:
            NotLeader: another coordinator has the runs.
            Unavailable: the job runs, and this coordinator has only just taken over.
            NotFound: no job is called that.
            InvalidField: the job does not run, or several that run have this name.
        """
        running = self.serving()
        found = [run for run in running if run.id == model] or [run for run in running if run.scope.spec.name == model]
        if len(found) == 1:
            return found[0]
        if found:
            ids = ", ".join(run.id for run in found)
            raise InvalidField("model", model, f"{len(found)} running jobs have this name", f"Use an id: {ids}.")
        unfinished = await jobs.unfinished(self.sessions)
        row = next((row for row in unfinished if model in (row.id, row.spec["name"])), None) or await self._ended(model)
        status = Status(row.status)
        if status is Status.RUNNING:
            raise Unavailable(f"Job {row.id} is being taken up; ask again.")
        fix = "Wait until it runs."
        if status is Status.PAUSED:
            fix = f"Resume it: rlharvest resume {row.id}"
        elif status in TERMINAL:
            fix = "Use a running job."
        raise InvalidField("model", model, f"job {row.id} is {status.value}, only a running one serves", fix)

    async def _ended(self, model: str) -> Job:
        try:
            return await jobs.get(self.sessions, model)
        except NotFound as error:
            names = ", ".join(run.id for run in self.serving()[:10]) or "none"
            raise NotFound(
                f"model = {model[:100]!r}: no job has this id, and no unfinished one this name. Running: {names}. "
                "Start one with rlharvest submit.",
                field="model",
            ) from error

    def start(self, run: Run, ask: Ask, order: Order) -> Completion:
        """Have a request sampled; close what is returned in any case.

        Raises:
            InvalidField: it asks for more than may ever be sampled at a time.
            LimitReached: as much is sampled as may be.
            NotLeader, Unavailable: the job has ceased to serve.
        """
        if run not in self.serving():
            raise Unavailable(f"Job {run.id} is {run.scope.status}; ask again.")
        n = len(order.prompts) * ask.n
        if n > self.most:
            problem = f"with {len(order.prompts)} prompts that is {n} responses, the limit is {self.most}"
            raise InvalidField("n", ask.n, problem, "Ask for fewer, or set RLHARVEST_MOST_COMPLETIONS.")
        if self.sampling + n > self.most:
            fix = "Wait for one to end, or set RLHARVEST_MOST_COMPLETIONS."
            raise LimitReached("completions at a time", self.most, fix)
        self.sampling += n

        def leave() -> None:
            self.sampling -= n

        return Completion(run, ask, order, leave)
