"""Requests made up from the description never break the server, and its answers are as described."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from .conftest import Served

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.core.result import Ok
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
UNREACHABLE = ("/readyz", "/v1/weights/{job}")
"""Answer 503 here, where nothing else runs."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_made_up_requests_are_answered_as_described(served: Served) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    assert len(operations) > 20
    for operation in operations:
        if operation.path in UNREACHABLE:
            continue

        @given(case=operation.as_strategy())
        @settings(
            max_examples=3,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def call(case: schemathesis.Case[Any]) -> None:
            case.validate_response(case.call(), checks=CHECKS)

        call()
