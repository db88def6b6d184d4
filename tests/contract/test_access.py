"""The tables of who may do what know every method and every kind of message that there is, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import yaml
from rlharvest import bus
from rlharvest.access import METHODS, OPEN_SERVICES
from rlharvest.grants import REWARD_CONSUMER, ROLES, ROUTES, SERVICES, grant
from rlharvest.v1 import batches_pb2, fleet_pb2, jobs_pb2, weights_pb2
from rlharvest_reward.service import CONSUMER

DOCUMENT = yaml.safe_load((Path(__file__).parents[2] / "proto" / "asyncapi.yaml").read_text(encoding="utf-8"))


def test_every_grpc_method_has_a_rule() -> None:
    """A method that is added and not named here would be refused to everybody."""
    declared = {
        f"/{service.full_name}/{method}"
        for module in (batches_pb2, fleet_pb2, jobs_pb2, weights_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods_by_name
    }
    assert declared == set(METHODS)
    assert not any(name.startswith(OPEN_SERVICES) for name in declared)


def test_every_kind_of_message_has_senders() -> None:
    assert set(ROUTES) == set(get_args(bus.Kind))
    assert all(route.senders for route in ROUTES.values())


@pytest.mark.parametrize("kind", sorted(ROUTES))
def test_permissions_are_those_of_the_document(kind: bus.Kind) -> None:
    """Who publishes a channel of the AsyncAPI document may do so, under the names that it says; who is not named may not.
    Who subscribes may hear it, unless it reads the channel through a stream."""
    channel = DOCUMENT["channels"][kind]
    names = channel["parameters"]["who"].get("enum")
    streamed = "x-jetstream" in channel
    for role in ROLES:
        who = "wkr_a" if role == "worker" else role
        given = grant(role, who)
        about = [f"rlharvest.v1.{kind}.rljob_a.{name}" for name in names or [who]]
        publishes = "rollout" if role == "worker" else role
        for subject in about:
            may = any(_matches(pattern, subject) for pattern in given.publish)
            assert may == (publishes in channel["x-publishers"]), (role, subject)
            hears = any(_matches(pattern, subject) for pattern in given.subscribe)
            wanted = publishes in channel["x-subscribers"]
            assert hears == wanted or (streamed and wanted), (role, subject)


def test_the_reward_service_s_consumer_is_the_one_that_it_may_use() -> None:
    assert CONSUMER == REWARD_CONSUMER


@pytest.mark.parametrize("role", SERVICES)
def test_a_service_s_subjects_are_ours(role: str) -> None:
    given = grant(role, role)  # type: ignore[arg-type]  # a role
    for subject in given.publish:
        assert subject.startswith(("rlharvest.v1.", "$JS."))
    for subject in given.subscribe:
        assert subject.startswith(("rlharvest.v1.", f"_INBOX.{role}."))


def _matches(pattern: str, subject: str) -> bool:
    ours, theirs = pattern.split("."), subject.split(".")
    return len(ours) == len(theirs) and all(one in ("*", other) for one, other in zip(ours, theirs, strict=True))
