"""What `rlharvest up` runs."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rlharvest.local import plan as plans
from rlharvest.local.cores import cores, threads
from rlharvest.local.launcher import Plan
from rlharvest.local.plan import Options
from rlharvest.local.program import Http, Program


def make(**chosen: object) -> Plan:
    options = Options(data=Path("/data"), roots=(Path("/work"),), **chosen)  # type: ignore[arg-type]  # by name
    ports = {name: 5000 + number for number, name in enumerate(plans.port_names(options))}
    return plans.make(
        options, ports, nats=Path("/nats"), valkey=Path("/valkey"), scripts=Path("/bin"), worker_port=lambda n: 6000 + n
    )


def names(plan: Plan) -> list[list[str]]:
    return [[program.name for program in stage] for stage in plan.stages]


def everything(plan: Plan) -> list[Program]:
    return [program for stage in plan.stages for program in stage] + [plan.worker(1), plan.worker(2)]


def test_stages_start_what_others_need_first_and_stop_it_last() -> None:
    plan = make(standby=True, trainers=2)
    assert names(plan) == [
        ["nats", "valkey"],
        ["migrate", "weights", "reward"],
        ["coordinator", "trainer-1", "trainer-2"],
        ["standby"],
    ]
    assert plan.stop_order == ("rollout", "trainer", "reward", "weights", "coordinator", "valkey", "nats")
    assert {program.role for program in everything(plan)} == {*plan.stop_order, "once"}


def test_no_two_programs_share_a_port_or_a_directory_and_all_know_both_coordinators() -> None:
    plan = make(standby=True, trainers=2)
    probes = [program.probe.url for program in everything(plan) if isinstance(program.probe, Http)]
    assert len(set(probes)) == len(probes)
    services = [program for program in everything(plan) if program.role not in ("nats", "valkey", "once")]
    assert len({program.environment["RLHARVEST_COORDINATOR_GRPC"] for program in services}) == 1
    assert "," in services[0].environment["RLHARVEST_COORDINATOR_GRPC"]
    own = [program.environment["RLHARVEST_DATA_DIR"] for program in services if program.role in ("trainer", "rollout")]
    assert len(set(own)) == len(own)
    # Both coordinators use one database.
    shared = [program.environment["RLHARVEST_DATA_DIR"] for program in services if program.role == "coordinator"]
    assert len(set(shared)) == 1


def test_cores_are_shared_out_among_torch_processes_and_a_choice_wins() -> None:
    assert make(cores=8, rollout=3).worker(1).environment["OMP_NUM_THREADS"] == "2"
    assert make(cores=8, rollout=3, threads=5).worker(1).environment["RLHARVEST_THREADS"] == "5"


@given(st.integers(1, 512), st.integers(0, 600))
def test_threads_never_exceed_the_cores_unless_there_are_more_processes_than_cores(count: int, processes: int) -> None:
    share = threads(count, processes)
    assert share >= 1
    assert share * processes <= count or share == 1


def test_a_quota_of_the_container_lowers_the_cores(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text("100000 100000\n")
    assert cores(quota) == 1
    quota.write_text("max 100000\n")
    assert cores(quota) >= 1
    assert cores(tmp_path / "none") >= 1


def test_only_workers_may_leave_and_paths_of_jobs_are_confined() -> None:
    plan = make()
    assert [program.name for program in everything(plan) if program.may_leave] == ["rollout-1", "rollout-2"]
    environment = plan.worker(1).environment
    assert json.loads(environment["RLHARVEST_ROOTS"]) == ["/work", "/data/checkpoints"]
    (reward,) = (program for program in everything(plan) if program.name == "reward")
    assert json.loads(reward.environment["RLHARVEST_ROOTS"]) == ["/work"]
    assert json.loads(reward.environment["RLHARVEST_REWARD_HIDDEN"]) == ["/data"]
    assert plan.url == "http://127.0.0.1:5000"
