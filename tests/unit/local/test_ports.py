"""Which port each program gets."""

from __future__ import annotations

import ast
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.errors import InvalidField
from rlharvest.local import ports


def choose(names: list[str], taken: set[int], **more: dict[str, int]) -> dict[str, int]:
    return ports.choose(
        names,
        given=more.get("given", {}),
        remembered=more.get("remembered", {}),
        free=lambda port: port not in taken,
        who=lambda port: "nginx (pid 7)",
        first=17000,
    )


def test_defaults_are_taken_when_free_and_the_next_free_port_otherwise() -> None:
    assert choose(["api", "nats"], set()) == {"api": 8080, "nats": 4222}
    assert choose(["nats", "x"], {4222, 17000}) == {"nats": 17001, "x": 17002}


def test_the_api_port_in_use_is_refused_with_its_holder_and_the_way_out() -> None:
    with pytest.raises(
        InvalidField, match=r"--port = 8080: the port is in use by nginx \(pid 7\).*--port 8081.*--port 0"
    ):
        choose(["api"], {8080})


def test_a_given_port_is_taken_or_refused_and_0_is_any() -> None:
    assert choose(["nats"], set(), given={"nats": 5000}) == {"nats": 5000}
    with pytest.raises(InvalidField, match="--nats-port"):
        choose(["nats"], {5000}, given={"nats": 5000})
    with pytest.raises(InvalidField, match="this launcher's api"):
        choose(["api", "nats"], set(), given={"api": 5000, "nats": 5000})
    assert choose(["api"], set(), given={"api": 0}) == {"api": 17000}


def test_remembered_ports_are_used_again_while_free() -> None:
    assert choose(["api", "nats"], set(), remembered={"api": 9000, "nats": 9001}) == {"api": 9000, "nats": 9001}
    assert choose(["nats"], {9001}, remembered={"nats": 9001}) == {"nats": 4222}


@given(
    st.sets(st.sampled_from(list(ports.DEFAULTS.values()))),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(17000, 17005)),
)
def test_no_two_programs_share_a_port_and_none_takes_one_in_use(taken: set[int], remembered: dict[str, int]) -> None:
    chosen = choose([*"abcdef", "nats", "grpc"], taken, remembered=remembered)
    assert len(set(chosen.values())) == len(chosen)
    assert not taken & set(chosen.values())


def test_is_free_sees_a_listener_and_holder_names_this_process() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not ports.is_free(port)
        assert "pid" in ports.holder(port)
    assert ports.is_free(port)


@pytest.mark.skipif(sys.platform != "linux", reason="claims are names of Linux")
def test_two_programs_that_start_at_once_are_not_given_the_same_port() -> None:
    """Also while nobody listens yet; what a program claimed is free again when it has ended."""
    code = (
        "from rlharvest.local.ports import choose\n"
        "print(choose(['a', 'b'], given={}, remembered={}), flush=True)\n"
        "input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = set(ast.literal_eval(other.stdout.readline()).values())
        assert len(theirs) == 2
        assert not theirs & set(ports.choose("abcd", given={}, remembered={}).values())
        assert not any(map(ports.claim, theirs))
        other.communicate("\n")
    assert all(map(ports.claim, theirs))
