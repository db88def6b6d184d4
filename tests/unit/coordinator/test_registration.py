"""A worker that joins says only what SQL can keep and subjects can hold."""

from __future__ import annotations

from typing import Any

import pytest
from rlharvest.errors import InvalidField
from rlharvest.v1 import fleet_pb2
from rlharvest_coordinator.registration import check

RIGHT: dict[str, Any] = {
    "worker": "wkr_1",
    "hostname": "host.example",
    "pid": 4_194_304,
    "slots": 16_384,
    "engines": ["torch", "stub"],
    "numerics_key": "cpu-f32 é",
    "build": "0.1.0 python-3.11",
    "worker_type": "h100-spot",
}


def test_what_a_worker_says_is_taken() -> None:
    check(fleet_pb2.RegisterRequest(**RIGHT))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker", ""),
        ("worker", "*"),
        ("worker", "a.b"),
        ("worker", "x" * 101),
        ("worker", "a\0"),
        ("pid", 2**31),
        ("slots", 2**32 - 1),
        ("hostname", "\0"),
        ("hostname", "x" * 501),
        ("build", "a\nb"),
        ("worker_type", "\x1b[0m"),
        ("numerics_key", "\0"),
        ("engines", ["x"] * 17),
        ("engines", ["\0"]),
    ],
)
def test_what_could_not_be_kept_or_addressed_is_named(field: str, value: object) -> None:
    """A name that is no token of a subject would stop the coordinator when it first writes to that worker."""
    with pytest.raises(InvalidField) as caught:
        check(fleet_pb2.RegisterRequest(**{**RIGHT, field: value}))
    assert caught.value.field == field
