"""What the doctor finds."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from rlharvest.local import doctor, ports


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("nats-server: v2.15.1", (2, 15, 1)),
        ("Valkey server v=9.1.2 sha=00000000:0 malloc=libc bits=64", (9, 1, 2)),
        ("Redis server v=7.0.15 sha=0", (7, 0, 15)),
        ("nonsense", ()),
    ],
)
def test_versions_are_read_from_what_the_programs_say(text: str, version: tuple[int, ...]) -> None:
    assert doctor.parse_version(text) == version


def test_everything_is_examined_and_what_is_not_ok_has_a_fix(tmp_path: Path) -> None:
    findings = doctor.examine(tmp_path)
    names = {finding.name for finding in findings}
    assert {
        "python",
        "rlharvest",
        "torch",
        "nats-server",
        "valkey-server",
        "disk",
        "memory",
        "cores",
        "docker",
    } <= names
    assert all(finding.fix for finding in findings if finding.level != "ok")


def test_a_port_in_use_names_its_holder_and_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr(ports, "DEFAULTS", {"api": port, "nats": port})
        found = {
            finding.found.partition(":")[0]: finding
            for finding in doctor.examine(tmp_path)
            if str(port) in finding.name
        }
    assert found["api"].level == "fail"
    assert "pid" in found["api"].found
    assert f"--port {port + 1}" in found["api"].fix
    assert found["nats"].level == "warn"


def test_a_directory_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    finding = next(one for one in doctor.examine(tmp_path / "file" / "data") if one.name == "data directory")
    assert finding.level == "fail"
    assert "--data" in finding.fix
