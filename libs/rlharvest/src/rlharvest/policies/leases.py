"""Which job each worker serves.

Invariants (property-tested): a worker serves at most one job; one whose job still runs keeps it, unless another job has no
worker at all and this one is idle and its job has others; a worker never waits on a job that does not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A worker, and the job that it serves now."""

    worker: str
    job: str | None
    engines: frozenset[str]
    idle: bool


def allot(tenants: Sequence[Tenant], jobs: Mapping[str, str]) -> dict[str, str]:
    """Return worker -> job for every worker that shall serve one.

    Args:
        jobs: running jobs in order of their start, each with the engine it needs.
    """
    allotted = {tenant.worker: tenant.job for tenant in tenants if tenant.job in jobs and _fits(tenant, jobs)}
    load = dict.fromkeys(jobs, 0)
    for job in allotted.values():
        assert job is not None
        load[job] += 1
    result = {worker: job for worker, job in allotted.items() if job is not None}
    for tenant in sorted(tenants, key=lambda tenant: tenant.worker):
        if tenant.worker in result:
            continue
        able = [job for job, engine in jobs.items() if engine in tenant.engines]
        if able:
            chosen = min(able, key=lambda job: load[job])
            result[tenant.worker] = chosen
            load[chosen] += 1
    for job, engine in jobs.items():
        if load[job]:
            continue
        spare = [
            tenant
            for tenant in sorted(tenants, key=lambda tenant: tenant.worker)
            if tenant.idle and engine in tenant.engines and load.get(result.get(tenant.worker, ""), 0) > 1
        ]
        if spare:
            load[result[spare[0].worker]] -= 1
            load[job] += 1
            result[spare[0].worker] = job
    return result


def _fits(tenant: Tenant, jobs: Mapping[str, str]) -> bool:
    return tenant.job is not None and jobs[tenant.job] in tenant.engines
