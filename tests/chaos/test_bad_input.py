"""Whatever is handed to the system, it says what is wrong, once and clearly, and goes on with everything else."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from rlharvest import bus
from rlharvest.errors import Conflict, NotFound, RlharvestError
from rlharvest.ledger.response import attempt_of
from rlharvest.spans import Finish, Flush, Run, Span, pack
from rlharvest.testing.audit import check_job
from rlharvest.testing.servers import NatsServer, ValkeyServer, free_port
from rlharvest.testing.system import System
from rlharvest.v1 import scores_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One system for all bad input of this module: none of it may harm the next test."""
    with System(tmp_path_factory.mktemp("system"), workers=1) as running:
        yield running


def failed(system: System, **changes: Any) -> str:
    """Submit a job whose inputs are wrong; return what it failed with."""
    job = system.submit(system.spec(**changes))
    system.until(lambda: system.job(job)["status"] == "failed", timeout_s=240, what=f"job {job} to fail")
    error = str(system.job(job)["error"])
    assert any(error in event["message"] for event in system.client.events(job)), "the event does not say why"
    return error


def works(system: System) -> None:
    """A job that is right still ends right."""
    spec = system.spec(limits={"max_steps": 1})
    found = system.wait(system.submit(spec), "succeeded", timeout_s=240)
    check_job(spec, found, system.samples(found["id"]))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sampling": {"num_generations": 0}}, "sampling.num_generations"),
        ({"algorithm": {"learning_rat": 1}}, "did you mean 'learning_rate'?"),
        ({"rewards": []}, "rewards"),
    ],
)
def test_a_bad_job_is_refused_before_it_is_one(system: System, changes: dict[str, Any], says: str) -> None:
    """Nothing is stored; the answer names the field and the fix."""
    before = len(list(system.client.list_jobs()))
    with pytest.raises(RlharvestError, match=re.escape(says)):
        system.client.create_job(system.spec(**changes))
    assert len(list(system.client.list_jobs())) == before


def test_a_dataset_with_a_broken_line_names_file_and_line(system: System) -> None:
    path = system.directory / "broken.jsonl"
    path.write_text('{"question": "1+1=", "answer": "2"}\n{"question": "1+2=", \n', encoding="utf-8")
    error = failed(system, dataset={"path": str(path)})
    assert "broken.jsonl" in error
    assert "2" in error


def test_a_dataset_without_the_wanted_column_names_what_it_found(system: System) -> None:
    path = system.directory / "columns.jsonl"
    path.write_text('{"text": "1+1="}\n', encoding="utf-8")
    assert "text" in failed(system, dataset={"path": str(path)})


def test_a_dataset_that_is_not_there_or_outside_of_the_roots_is_named(system: System) -> None:
    assert "nowhere.jsonl" in failed(system, dataset={"path": str(system.directory / "nowhere.jsonl")})
    outside = failed(system, dataset={"path": "/etc/hostname"})
    assert "/etc/hostname" in outside
    assert str(system.directory) in outside, "it does not say which directories may be used"


def test_a_model_directory_that_lacks_or_breaks_a_file_names_it(system: System) -> None:
    empty = system.directory / "empty"
    empty.mkdir(exist_ok=True)
    assert "config.json" in failed(system, model=str(empty))
    broken = system.directory / "half"
    broken.mkdir(exist_ok=True)
    for path in Path(system.spec()["model"]).iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / "model.safetensors").write_bytes(b"\x10")
    assert "model.safetensors" in failed(system, model=str(broken))


def test_settings_of_the_stub_engine_that_cannot_be_are_named(system: System) -> None:
    assert "rollout.stub.step_s" in failed(system, rollout={"stub": {"step_s": -1}})


def test_a_reward_file_that_is_missing_or_does_not_parse_is_named(system: System) -> None:
    gone = str(system.directory / "gone.py")
    assert "gone.py" in failed(system, rewards=[{"path": gone}])
    wrong = system.directory / "wrong.py"
    wrong.write_text("def compute_score(:\n", encoding="utf-8")
    error = failed(system, rewards=[{"path": str(wrong)}])
    assert "wrong.py" in error
    nameless = system.directory / "nameless.py"
    nameless.write_text("def other(prompts, completions):\n    return [0.0]\n", encoding="utf-8")
    assert "compute_score" in failed(system, rewards=[{"path": str(nameless)}])
    works(system)


def span(handle: int, attempt: int) -> bytes:
    part = Span(
        handle=handle,
        attempt=attempt,
        offset=0,
        ids=np.array([7, 7, 7], np.uint32),
        logprobs=np.zeros(3, np.float32),
        runs=(Run(3, 0),),
        finish=Finish.EOS,
    )
    return pack(Flush(worker="wkr_nobody", incarnation=1, number=1, spans=(part,)))


def publish(system: System, messages: list[tuple[str, bytes]]) -> None:
    """Publish raw messages, as anything that can reach NATS might."""

    async def send() -> None:
        client = await bus.connect(system.nats.url, "stranger", credential=system.nats.credential)
        for subject, data in messages:
            await client.publish(subject, data)
        await client.flush()
        await client.close()

    asyncio.run(send())


def metric(system: System, name: str, kind: str) -> float:
    """Value of one of the coordinator's counters."""
    found = re.search(rf'^{name}_total{{kind="{kind}"}} (\S+)$', system.metrics(), re.MULTILINE)
    return float(found.group(1)) if found else 0.0


GARBAGE = [b"", b"\x00", b"\xff" * 64, b"{}", bytes(range(256))]


def test_garbage_on_every_subject_of_a_running_job_is_ignored_and_counted(system: System) -> None:
    """From a stranger, in the name of the job, of its worker and of nobody: nobody stops, no token changes."""
    spec = system.spec(rollout={"stub": {"step_s": 0.03, "mean_length": 30}}, limits={"max_steps": 2})
    job = system.submit(spec)
    system.until(
        lambda: system.job(job)["counters"].get("generated_tokens", 0) > 20, timeout_s=240, what="responses to run"
    )
    (worker,) = [item["id"] for item in system.client.workers() if item["state"] not in ("dead", "gone")]
    beats, events = (metric(system, "rlharvest_corrupt_messages", kind) for kind in ("beat", "events"))
    pids = [service.process.pid for service in system.services if service.process is not None]
    subjects = [
        bus.subject(kind, where, who)
        for kind in get_args(bus.Kind)
        for where in (job, bus.NO_JOB)
        for who in (worker, "coordinator", "reward", "wkr_nobody")
    ]
    publish(system, [(subject, data) for subject in subjects for data in GARBAGE])
    found = system.wait(job, "succeeded", timeout_s=240)
    check_job(spec, found, system.samples(job))
    assert found["counters"]["corrupt_messages"] > 0
    assert metric(system, "rlharvest_corrupt_messages", "beat") > beats
    assert metric(system, "rlharvest_corrupt_messages", "events") > events
    assert all(service.running for service in system.services if service.process is not None), "a service died"
    assert pids == [service.process.pid for service in system.services if service.process is not None]
    works(system)


def test_late_results_for_jobs_that_are_over_or_never_were_change_nothing(system: System) -> None:
    """Spans and scores for an unknown, a cancelled and a deleted job are counted and ignored."""
    slow = system.spec(rollout={"stub": {"step_s": 0.5}})
    cancelled, deleted = system.submit(slow), system.submit(slow)
    for job in (cancelled, deleted):
        system.client.cancel(job)
        system.wait(job, "cancelled", timeout_s=240)
    system.client.delete(deleted)
    before = system.job(cancelled)
    spans, scores = (metric(system, "rlharvest_ignored_messages", kind) for kind in ("spans", "scored"))
    messages = []
    for job in (cancelled, deleted, "rljob_never"):
        result = scores_pb2.ScoreResult(job=job, handle=0, reward=1.0).SerializeToString()
        messages += [
            (bus.subject("spans", job, "wkr_nobody"), span(0, attempt_of(1, 1))),
            (bus.subject("scored", job, "reward"), result),
        ]
    publish(system, messages)
    system.until(
        lambda: (
            metric(system, "rlharvest_ignored_messages", "spans") >= spans + 3
            and metric(system, "rlharvest_ignored_messages", "scored") >= scores + 3
        ),
        timeout_s=240,
        what="the late results to be counted",
    )
    after = system.job(cancelled)
    assert (after["status"], after["counters"]) == (before["status"], before["counters"])
    with pytest.raises(NotFound):
        system.client.get_job(deleted)
    with pytest.raises(NotFound):
        system.client.get_job("rljob_never")
    with pytest.raises(Conflict):
        system.client.resume(cancelled)
    works(system)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The surroundings that a service needs to come as far as its ports."""
    directory = tmp_path_factory.mktemp("ports")
    nats, valkey = NatsServer(directory / "nats"), ValkeyServer(directory / "valkey")
    nats.start()
    valkey.start()
    database = f"sqlite+aiosqlite:///{directory / 'rlharvest.db'}"
    program = Path(sys.executable).parent / "rlharvest-coordinator"
    subprocess.run([program, "migrate"], env={**os.environ, "RLHARVEST_SQL_URL": database}, check=True)
    yield {
        "RLHARVEST_SQL_URL": database,
        "RLHARVEST_NATS_URL": nats.url,
        "RLHARVEST_REDIS_URL": valkey.url,
        "RLHARVEST_DATA_DIR": str(directory / "data"),
        "RLHARVEST_ROOTS": json.dumps([str(directory)]),
        "RLHARVEST_LOG_FORMAT": "console",
        "RLHARVEST_ENGINES": "stub",
        "RLHARVEST_TRAINER": "trainer-0",
        "RLHARVEST_API_PORT": str(free_port()),
        "RLHARVEST_HTTP_PORT": str(free_port()),
        "RLHARVEST_GRPC_ADDRESS": f"127.0.0.1:{free_port()}",
        "RLHARVEST_COORDINATOR_GRPC": f"127.0.0.1:{free_port()}",
    }
    nats.stop()
    valkey.stop()


def told(program: str, environment: dict[str, str]) -> tuple[int, str]:
    """Run a service that cannot start; return its exit status and what it wrote."""
    done = subprocess.run(
        [Path(sys.executable).parent / program, "serve"],
        env={**os.environ, **environment},
        capture_output=True,
        timeout=240,
        check=False,
    )
    return done.returncode, (done.stdout + done.stderr).decode()


@pytest.mark.parametrize(
    ("program", "variable"),
    [
        ("rlharvest-coordinator", "RLHARVEST_API_PORT"),
        ("rlharvest-coordinator", "RLHARVEST_GRPC_ADDRESS"),
        ("rlharvest-weights", "RLHARVEST_HTTP_PORT"),
        ("rlharvest-weights", "RLHARVEST_GRPC_ADDRESS"),
        ("rlharvest-reward", "RLHARVEST_HEALTH_PORT"),
        ("rlharvest-rollout", "RLHARVEST_HEALTH_PORT"),
        ("rlharvest-trainer", "RLHARVEST_HEALTH_PORT"),
    ],
)
def test_a_port_in_use_is_one_clear_error(servers: dict[str, str], program: str, variable: str) -> None:
    """Status 1, the variable, the address and what to do; no traceback."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        value = f"127.0.0.1:{port}" if variable.endswith("ADDRESS") else str(port)
        status, text = told(program, {**servers, variable: value})
    assert status == 1, text
    assert variable in text
    assert f"127.0.0.1:{port}" in text
    assert "choose another" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("program", "variable", "value"),
    [
        ("rlharvest-coordinator", "RLHARVEST_API_PORT", "eighty"),
        ("rlharvest-weights", "RLHARVEST_HTTP_PORT", "eighty"),
        ("rlharvest-reward", "RLHARVEST_HEALTH_PORT", "eighty"),
        ("rlharvest-rollout", "RLHARVEST_SLOTS", "many"),
        ("rlharvest-trainer", "RLHARVEST_HEALTH_PORT", "eighty"),
    ],
)
def test_a_setting_that_is_none_is_named_with_its_value(
    servers: dict[str, str], program: str, variable: str, value: str
) -> None:
    status, text = told(program, {**servers, variable: value})
    assert status in (1, 2), text
    assert variable.lower() in text.lower() or variable.removeprefix("RLHARVEST_").lower() in text
    assert value in text
    assert "Traceback" not in text


def test_a_row_too_large_for_any_message_drops_its_group_and_the_job_goes_on(system: System) -> None:
    """Its columns go to the reward function, and NATS takes a megabyte."""
    rows = [{"question": f"{i}+1=", "answer": str(i + 1), "notes": "n" * (1 << 20 if i == 3 else 1)} for i in range(8)]
    path = system.directory / "large.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = system.submit(system.spec(dataset={"path": str(path), "shuffle": False}, limits={"max_steps": 2}))
    counters = system.wait(job, "succeeded", timeout_s=240)["counters"]
    assert counters["submitted"] == counters["trained"] + counters["dropped"] + counters["outstanding"]
    dropped = [event for event in system.client.events(job) if event["type"] == "group.too_large"]
    assert dropped
    assert "Leave out large columns" in dropped[0]["message"]
