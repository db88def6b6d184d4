"""The rule of who may call what: pure, for every method and role."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.access import JOINING, METHODS, OPEN_PATHS, OPEN_SERVICES, Access, Role
from rlharvest.credentials import Tokens

ROLES: tuple[Role, ...] = ("api", "worker", "service")
ACCESS = Access({role: Tokens([f"token of {role}"]) for role in ROLES})
NAMED = Access(ACCESS.tokens, identify={"jwt of a": "wkr_a"}.get)
FLEET = "/rlharvest.v1.Fleet/"

methods = st.sampled_from(sorted(METHODS))
roles = st.sampled_from(ROLES)


@given(methods, roles)
def test_a_method_is_open_to_its_roles_and_to_no_other(method: str, role: Role) -> None:
    verdict = ACCESS.method(method, f"token of {role}")
    assert (verdict is None) == (role in METHODS[method])
    assert verdict is None or verdict.kind == "forbidden"


@given(methods, st.text(max_size=20))
def test_without_a_valid_token_no_method_is_open(method: str, given: str) -> None:
    for access in (ACCESS, NAMED):
        verdict = access.method(method, given)
        assert verdict is not None
        assert verdict.kind == "unknown"


@given(st.text(max_size=30), roles)
def test_a_method_that_is_not_in_the_table_is_open_to_nobody(name: str, role: Role) -> None:
    verdict = ACCESS.method(f"/rlharvest.v1.Other/{name}", f"token of {role}")
    assert verdict is not None


def test_trainers_batches_workers_fleet_and_people_jobs() -> None:
    assert METHODS["/rlharvest.v1.Batches/NextBatch"] == {"service"}
    assert METHODS["/rlharvest.v1.Weights/Publish"] == {"service"}
    assert METHODS["/rlharvest.v1.Fleet/Register"] == {"worker"}
    assert METHODS["/rlharvest.v1.Jobs/Create"] == {"api"}


@pytest.mark.parametrize("service", OPEN_SERVICES)
def test_health_and_reflection_are_open(service: str) -> None:
    assert ACCESS.method(f"{service}Check", "") is None


def test_a_server_without_tokens_takes_everybody() -> None:
    assert Access().method("/rlharvest.v1.Batches/Claim", "") is None
    assert Access().http("PUT", "/v1/blobs/x", "") is None
    assert Access().speaks(f"{FLEET}Leave", "", "wkr_a") is None


@pytest.mark.parametrize("name", ["Register", "Leave", "GetPrefix"])
def test_a_worker_speaks_for_itself_only(name: str) -> None:
    """The token that all workers share lets one in; after that each call needs the worker's own credential."""
    method = FLEET + name
    shared = NAMED.method(method, "token of worker")
    assert shared is not None
    assert shared.kind == "forbidden"
    assert NAMED.method(method, "jwt of a") is None
    assert NAMED.speaks(method, "jwt of a", "wkr_a") is None
    for other in ("wkr_b", ""):
        assert NAMED.speaks(method, "jwt of a", other) is not None


def test_joining_takes_the_token_that_workers_share() -> None:
    assert NAMED.method(JOINING, "token of worker") is None
    assert NAMED.speaks(JOINING, "token of worker", "wkr_new") is None
    assert NAMED.method(JOINING, "token of api") is not None


@pytest.mark.parametrize(
    ("method", "allowed"),
    [("GET", {"worker", "service"}), ("HEAD", {"worker", "service"}), ("PUT", {"service"}), ("DELETE", {"service"})],
)
def test_workers_read_weights_and_services_write_them(method: str, allowed: set[str]) -> None:
    for role in ROLES:
        verdict = ACCESS.http(method, "/v1/blobs/x", f"token of {role}")
        assert (verdict is None) == (role in allowed), role
    verdict = ACCESS.http(method, "/v1/blobs/x", "")
    assert verdict is not None
    assert verdict.kind == "unknown"


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_health_and_metrics_of_the_weight_service_are_open(path: str) -> None:
    assert ACCESS.http("GET", path, "") is None
