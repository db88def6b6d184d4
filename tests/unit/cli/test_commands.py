"""Commands against a server that is a dictionary: output, exit codes, errors in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rlharvest.cli import main, watch
from rlharvest.cli.tables import short
from rlharvest.weights.manifest import describe

JOB = "rljob_01k00000000000000000000001"


def run(*arguments: str) -> int:
    """Run the command line in this process; return its exit code."""
    before = sys.argv
    sys.argv = ["rlharvest", *arguments]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text("model: m\ndataset: {path: x.jsonl}\nrewards: [{builtin: exact_match}]\n")
    return path


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("version") == 0
    assert capsys.readouterr().out.startswith("rlharvest 0.")


def test_submit_prints_the_id_alone_and_sends_key_and_settings(
    server: Any, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("submit", str(file), "--set", "seed=5", "--key", "k", "--token", "secret") == 0
    assert capsys.readouterr().out == JOB + "\n"
    request = server.requests[-1]
    assert json.loads(request.content)["seed"] == 5
    assert request.headers["Idempotency-Key"] == "k"
    assert request.headers["Authorization"] == "Bearer secret"


def test_what_the_server_refuses_is_one_line_and_exit_code_2(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.yaml").write_text("name: x\n")
    assert run("submit", str(tmp_path / "bad.yaml")) == 2
    assert capsys.readouterr().err == "error: model: field required. docs/job.md lists every field.\n"
    assert run("submit", str(tmp_path / "none.yaml")) == 2


def test_a_server_that_does_not_answer_is_exit_code_3(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.down = True
    assert run("jobs") == 3
    assert capsys.readouterr().err == "error: http://test does not answer: refused\n"


def test_an_unknown_option_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("jobs", "--nonsense") == 2


def test_a_job_that_does_not_exist_is_exit_code_2(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "zzz") == 2
    assert "rlharvest jobs" in capsys.readouterr().err


def test_jobs_show_and_workers_say_what_matters(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("jobs") == 0
    listed = capsys.readouterr().out
    assert all(word in listed for word in ("…0000000001", "sums", "running", "3/10"))
    assert run("show", "last") == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in (JOB, "WaitingForWorkers 0 ready workers.", "3 of 10", "1 ready, 2 lost"))
    assert run("workers") == 0
    listed = capsys.readouterr().out
    assert all(word in listed for word in ("…0000000009", "spot-1", "4/32", "123.5"))
    server.workers[0]["state"] = "dead"
    assert run("workers") == 0
    assert "There is no worker" in capsys.readouterr().out


def test_samples_show_workers_and_versions_of_the_tokens_and_never_read_text_as_markup(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("samples", "last", "--step", "2", "--min-reward", "0.1", "-n", "1") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "[bold]2" in text
    assert "4 by wkr_a from 0 (attempt 1.1); 5 by wkr_b from 4 (attempt 2.3)" in text
    assert "4 by version 1, 5 by version 2" in text
    asked = next(request for request in server.requests if request.url.path.endswith("/samples"))
    assert (asked.url.params["step"], asked.url.params["min_reward"]) == ("2", "0.1")


def test_the_audit_says_who_did_what(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("audit", "--of", JOB, "-n", "5") == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("token-0a1b2c3d4e5f", "10.1.2.3", "cancel_job", short(JOB), "409"))
    assert dict(server.requests[-1].url.params) == {"subject": JOB, "limit": "5"}


def test_events_and_verbs(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("events", "last") == 0
    assert "worker.dead" in capsys.readouterr().out
    for verb in ("cancel", "pause", "resume"):
        assert run(verb, "last") == 0
        assert capsys.readouterr().out == f"{JOB} is pausing\n"
    assert run("drain", "0009") == 0
    assert server.requests[-1].url.path == "/v1/workers/wkr_01k00000000000000000000009/drain"


def test_json_is_the_servers_own(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "last", "--json") == 0
    assert json.loads(capsys.readouterr().out) == server.jobs[0]


@pytest.mark.parametrize(("status", "code"), [("succeeded", 0), ("failed", 1), ("cancelled", 1)])
def test_watch_prints_a_line_a_step_and_ends_with_the_jobs_outcome(
    server: Any, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    def go_on() -> None:
        progress = server.jobs[0]["progress"]
        progress["step"] += 1
        if progress["step"] == 6:
            server.jobs[0] |= {"status": status, "error": "the disk is full" if status == "failed" else None}

    server.on_job = go_on
    assert run("watch", JOB, "--every", "0.1") == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "step 4/10  reward 0.4  length 7.5" in lines[0]
    assert "salvaged 55 regenerated 7" in lines[0]
    assert lines[-1].startswith(status)
    assert ("the disk is full" in lines[-1]) == (status == "failed")


def test_watch_goes_on_over_a_restart_of_the_server(
    server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def go_on() -> None:
        nonlocal looks
        looks += 1
        server.down = looks == 2
        if looks > 2:
            server.jobs[0]["status"] = "succeeded"

    class Clock:
        """Each pause brings the server back."""

        def sleep(self, seconds: float) -> None:
            server.down = False

        def time(self) -> float:
            return 2000.0

    server.on_job = go_on
    monkeypatch.setattr(watch, "time", Clock())
    assert run("watch", JOB) == 0
    out = capsys.readouterr().out
    assert "http://test does not answer: refused; trying on" in out
    assert "succeeded" in out


def checkpoint(directory: Path, step: int) -> dict[str, Any]:
    """A checkpoint as the trainer writes one, and as REST shows it."""
    path = directory / f"step_{step}"
    (path / "trainer").mkdir(parents=True)
    names = ["config.json", "model.safetensors", "trainer/optimizer.safetensors"]
    for name in names:
        (path / name).write_bytes(f"{name} {step}".encode())
    files = {name: json.loads(describe(path / name).model_dump_json()) for name in names}
    (path / "state.json").write_text(json.dumps({"step": step, "files": files}))
    return {"id": f"ckpt_{step}", "step": step, "version": step, "path": str(path)}


def test_export_copies_the_model_alone_and_verifies_it(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.checkpoints = [checkpoint(tmp_path / "c", 4), checkpoint(tmp_path / "c", 2)]
    assert run("export", "last", str(tmp_path / "out")) == 0
    assert "step 4" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert run("export", "last", str(tmp_path / "out")) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert run("export", "last", str(tmp_path / "two"), "--step", "2") == 0
    assert (tmp_path / "two" / "config.json").read_text() == "config.json 2"
    assert run("export", "last", str(tmp_path / "three"), "--step", "3") == 2
    assert "there are: 4, 2" in capsys.readouterr().err


def test_export_of_a_damaged_checkpoint_leaves_nothing(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.checkpoints = [checkpoint(tmp_path / "c", 4)]
    (tmp_path / "c" / "step_4" / "model.safetensors").write_bytes(b"other")
    assert run("export", "last", str(tmp_path / "out")) == 2
    assert "model.safetensors" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
