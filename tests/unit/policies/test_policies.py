"""Decisions keep their invariants on any input."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rlharvest.policies import batching, blame
from rlharvest.policies.dispatch import Candidate, Waiting, assign
from rlharvest.policies.leases import Tenant, allot
from rlharvest.policies.staleness import Gate, over_age, staleness

# --- staleness ------------------------------------------------------------------------------------------------------------


def test_gate_is_areals_inequality() -> None:
    """A group may start only while floor(N / G) <= i + eta."""
    for size in (1, 3, 8):
        for eta in (0, 1, 4):
            gate = Gate(size, eta, max_steps=10_000)
            for step in range(5):
                counted = 0
                while counted // size <= step + eta:
                    assert gate.room(counted=counted, step=step) > 0
                    counted += 1
                assert gate.room(counted=counted, step=step) == 0


@given(st.integers(1, 20), st.integers(0, 5), st.integers(1, 30), st.integers(0, 40), st.integers(0, 2000))
def test_in_flight_work_never_exceeds_the_gate(size: int, eta: int, steps: int, step: int, counted: int) -> None:
    gate = Gate(size, eta, steps)
    after = counted + gate.room(counted=counted, step=step)
    assert after <= max(counted, min((step + eta + 1) * size, steps * size))


def test_zero_staleness_never_locks_when_groups_are_dropped() -> None:
    """A dropped group lowers N, so its place is filled; otherwise eta = 0 would wait for ever."""
    gate = Gate(4, 0, max_steps=10)
    assert gate.room(counted=4, step=0) == 0
    assert gate.room(counted=3, step=0) == 1


def test_a_sample_at_the_bound_is_kept_and_one_beyond_is_not() -> None:
    assert not over_age(staleness(batch=7, oldest_step=5), max_staleness=2)
    assert over_age(staleness(batch=8, oldest_step=5), max_staleness=2)


def test_a_version_from_before_a_rollback_is_not_of_negative_age() -> None:
    assert staleness(batch=3, oldest_step=9) == 0


@given(st.integers(1, 10), st.integers(0, 5), st.integers(0, 200))
def test_a_group_that_starts_on_an_allowed_version_is_never_over_age(size: int, eta: int, rank: int) -> None:
    gate = Gate(size, eta, max_steps=10_000)
    age = staleness(batch=gate.batch_of(rank), oldest_step=gate.oldest_step(rank))
    assert not over_age(age, max_staleness=eta)


# --- dispatch -------------------------------------------------------------------------------------------------------------

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        worker=st.sampled_from([f"w{i}" for i in range(6)]),
        slots=st.integers(1, 5),
        held=st.integers(0, 5),
        step=st.integers(0, 3),
        version=st.integers(0, 3),
        quarantined=st.booleans(),
    ),
    unique_by=lambda item: item.worker,
)
WAITING = st.lists(
    st.builds(
        Waiting,
        handle=st.integers(0, 30),
        min_step=st.integers(0, 3),
        min_version=st.integers(0, 3),
        suspected=st.booleans(),
    ),
    unique_by=lambda item: item.handle,
)


@given(WAITING, CANDIDATES)
def test_dispatch_respects_slots_versions_and_quarantine(waiting: list[Waiting], workers: list[Candidate]) -> None:
    pairs = assign(waiting, workers)
    by_name = {worker.worker: worker for worker in workers}
    by_handle = {response.handle: response for response in waiting}
    assert len({handle for handle, _ in pairs}) == len(pairs), "a response went to two workers"
    given_to: dict[str, list[Waiting]] = {}
    for handle, name in pairs:
        worker, response = by_name[name], by_handle[handle]
        assert worker.step >= response.min_step
        assert worker.version >= response.min_version
        assert not worker.quarantined
        given_to.setdefault(name, []).append(response)
    for name, responses in given_to.items():
        assert by_name[name].held + len(responses) <= by_name[name].slots
        if any(response.suspected for response in responses):
            assert by_name[name].held == 0
            assert len(responses) == 1


@given(WAITING, CANDIDATES)
def test_no_response_waits_while_a_worker_that_may_serve_it_is_free(
    waiting: list[Waiting], workers: list[Candidate]
) -> None:
    pairs = assign(waiting, workers)
    given_to = dict(pairs)
    alone = {name for handle, name in pairs if next(w for w in waiting if w.handle == handle).suspected}
    load = {worker.worker: worker.held for worker in workers}
    for _, name in pairs:
        load[name] += 1
    for response in waiting:
        if response.handle in given_to or response.suspected:
            continue
        for worker in workers:
            free = load[worker.worker] < worker.slots and not worker.quarantined and worker.worker not in alone
            assert not (free and worker.step >= response.min_step and worker.version >= response.min_version)


@given(WAITING, CANDIDATES)
def test_dispatch_is_deterministic(waiting: list[Waiting], workers: list[Candidate]) -> None:
    assert assign(waiting, workers) == assign(waiting, list(reversed(workers)))


def test_dispatch_joins_the_shortest_queue() -> None:
    workers = [
        Candidate(worker="busy", slots=4, held=3, step=0, version=0),
        Candidate(worker="idle", slots=4, held=0, step=0, version=0),
    ]
    pairs = assign([Waiting(handle=i) for i in range(4)], workers)
    assert [name for _, name in pairs] == ["idle", "idle", "idle", "busy"]


# --- batching -------------------------------------------------------------------------------------------------------------


@given(st.data())
def test_membership_depends_on_drops_alone(data: st.DataObject) -> None:
    """Groups finish in any order, some are dropped: batch t is the first G survivors that are in no earlier batch."""
    total, size = data.draw(st.integers(1, 14)), data.draw(st.integers(1, 4))
    fates = {ordinal: data.draw(st.booleans()) for ordinal in range(total)}  # True: survives
    running, accepted = set(range(total)), []
    batches: list[list[int]] = [[]]
    for ordinal in data.draw(st.permutations(range(total))):
        running.discard(ordinal)
        if fates[ordinal]:
            accepted.append(ordinal)
        while chosen := batching.commit(running=running, accepted=accepted, committed=len(batches[-1]), size=size):
            batches[-1] += chosen
            accepted = [item for item in accepted if item not in chosen]
            if len(batches[-1]) == size:
                batches.append([])
            assert len(batches[-1]) <= size
    survivors = [ordinal for ordinal in range(total) if fates[ordinal]]
    whole = [sorted(batch) for batch in batches if len(batch) == size]
    assert whole == [survivors[at : at + size] for at in range(0, len(survivors) - size + 1, size)]


def test_completion_order_takes_what_is_there() -> None:
    assert batching.commit(running=[0], accepted=[3, 1], committed=0, size=2, order="completion") == [3, 1]


def test_blame() -> None:
    assert [blame.suspected(n) for n in (2, 3)] == [False, True]
    assert [blame.condemned(n) for n in (4, 5)] == [False, True]


# --- leases ---------------------------------------------------------------------------------------------------------------

JOBS = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sampled_from(["torch", "stub"]))
TENANTS = st.lists(
    st.builds(
        Tenant,
        worker=st.sampled_from([f"w{i}" for i in range(6)]),
        job=st.sampled_from(["a", "b", "c", None]),
        engines=st.frozensets(st.sampled_from(["torch", "stub"]), min_size=1),
        idle=st.booleans(),
    ),
    unique_by=lambda item: item.worker,
)


@given(TENANTS, JOBS)
def test_workers_serve_running_jobs_that_they_can_serve(tenants: list[Tenant], jobs: dict[str, str]) -> None:
    allotted = allot(tenants, jobs)
    engines = {tenant.worker: tenant.engines for tenant in tenants}
    for worker, job in allotted.items():
        assert jobs[job] in engines[worker]
    for tenant in tenants:
        if any(engine in tenant.engines for engine in jobs.values()):
            assert tenant.worker in allotted, "a worker that could work is left out"


@given(TENANTS, JOBS)
def test_busy_workers_keep_their_job_and_allotment_is_stable(tenants: list[Tenant], jobs: dict[str, str]) -> None:
    allotted = allot(tenants, jobs)
    for tenant in tenants:
        if tenant.job in jobs and jobs[tenant.job] in tenant.engines and not tenant.idle:
            assert allotted[tenant.worker] == tenant.job
    settled = [Tenant(worker=t.worker, job=allotted.get(t.worker), engines=t.engines, idle=t.idle) for t in tenants]
    assert allot(settled, jobs) == allotted, "ping-pong"
