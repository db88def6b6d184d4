"""REST: requests made up from the server's own description, right ones and wrong ones, with a token and without.

Every answer must be one that the description names, of the type and the shape that it says; wrong data must be refused; and
nobody without a token gets past the door. Requests that would rightly change the jobs under test are not made.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import requests
from hypothesis.errors import Unsatisfiable
from rlharvest.testing.system import System
from rlharvest_coordinator.api import guard

from benchmarks.fuzz.calls import Outcome, Target
from benchmarks.fuzz.messages import drawn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its dependencies use what is deprecated
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.config import SchemathesisConfig
    from schemathesis.core.failures import Failure, FailureGroup
    from schemathesis.core.result import Ok
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        negative_data_rejection,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
OPEN = ("/livez", "/readyz")
"""Paths that say nothing of jobs and are told to everybody."""

VERBS = ("DELETE", "POST")
CALL_S = 30.0
HEADS = (guard.HEAD_BYTES, 1 << 20)
"""Bytes of heads that nobody reads: a little too long, so that they come at once, and so long that they come in pieces."""


class Rest:
    """Makes up requests to a running system."""

    def __init__(self, system: System, target: Target, *, seed: int) -> None:
        self.url = f"http://127.0.0.1:{system.api_port}"
        self.target = target
        self.seed = seed
        self.outcome = Outcome()
        self.created = 0
        """Jobs that right requests made."""
        self.by_operation: Counter[str] = Counter()
        self._session = requests.Session()
        # A stream of events would never end.
        self._headers = {"Authorization": f"Bearer {system.keyring.token('api_token')}", "Accept": "application/json"}
        # A header that is left out or made up would be put right by the one that each call is made with.
        config = SchemathesisConfig.from_dict({"generation": {"with-security-parameters": False}})
        schema = schemathesis.openapi.from_url(f"{self.url}/openapi.json", config=config, headers=self._headers)
        self.operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]

    def run(self, *, n: int, until: float | None = None) -> None:
        """Make `n` right and `n` wrong requests of each operation, or round after round until a monotonic time."""
        turn = 0
        while turn == 0 or (until is not None and time.monotonic() < until):
            for operation in self.operations:
                for case in self._cases(operation, n, self.seed + turn):
                    self._with_token(operation, case)
                    if until is not None and turn and time.monotonic() >= until:
                        return
                for case in drawn(operation.as_strategy(), max(1, n // 4), of=self.seed + turn):
                    self._without(operation, case)
                self._with_long_heads(operation)
            turn += 1

    def _cases(self, operation: Any, n: int, seed: int) -> Iterator[Any]:
        for mode in GenerationMode:
            try:
                yield from drawn(operation.as_strategy(generation_mode=mode), n, of=seed)
            except (schemathesis.errors.InvalidSchema, Unsatisfiable):
                continue  # nothing of it can be wrong
        known = self._known(operation)
        if known:
            yield from drawn(operation.as_strategy(path_parameters=known), n, of=seed)

    def _known(self, operation: Any) -> dict[str, str]:
        """Return true values for the places in a path, where a right request changes nothing."""
        if operation.method.upper() == "DELETE" or operation.path.endswith("/drain"):
            return {}
        names = {"job": self.target.over, "worker": self.target.worker, "response": "resp_none_0"}
        return {name: value for name, value in names.items() if f"{{{name}}}" in operation.path}

    def _with_token(self, operation: Any, case: Any) -> None:
        answer = case.call(session=self._session, headers=self._headers, timeout=CALL_S)
        self._count(operation, answer.status_code)
        if answer.status_code == 201:
            self.created += 1
        try:
            case.validate_response(answer, checks=CHECKS)
        except (FailureGroup, Failure) as error:
            found = error.exceptions if isinstance(error, FailureGroup) else [error]
            for failure in found:
                self._fault(operation, case, answer, f"{type(failure).__name__}: {failure}")

    def _without(self, operation: Any, case: Any) -> None:
        for shown in ({}, {"Authorization": "Bearer of-nobody"}):
            headers = {"Accept": "application/json", **shown}
            answer = case.call(session=self._session, headers=headers, timeout=CALL_S)
            self._count(operation, answer.status_code)
            allowed = (200, 400) if operation.path in OPEN else (401, 413, 431)
            if answer.status_code not in allowed:
                self._fault(operation, case, answer, f"answered {answer.status_code} without a token")

    def _with_long_heads(self, operation: Any) -> None:
        path = operation.path.replace("{", "").replace("}", "")
        for size in HEADS:
            for url, headers in (
                (f"{path}?a={'x' * size}", self._headers),
                (path, {**self._headers, "X-A": "x" * size}),
            ):
                answer = self._session.request(operation.method, f"{self.url}{url}", headers=headers, timeout=CALL_S)
                self._count(operation, answer.status_code)
                if answer.status_code != 431 or "message" not in answer.json()["error"]:
                    problem = f"{operation.label} answered {answer.status_code} {answer.content[:200]!r}"
                    self.outcome.faults.append(f"{problem} to a head of {size} bytes and more")

    def _count(self, operation: Any, status: int) -> None:
        self.outcome.calls += 1
        self.outcome.statuses[str(status)] += 1
        self.by_operation[operation.label] += 1

    def _fault(self, operation: Any, case: Any, answer: Any, problem: str) -> None:
        shown = " ".join(problem.split())[:600]
        self.outcome.faults.append(
            f"{operation.label} answered {answer.status_code} {answer.content[:200]!r}: {shown}; {_request(case)}"
        )


def _request(case: Any) -> str:
    """Return how to make the request again."""
    try:
        return str(case.as_curl_command())[:1000]
    except Exception as error:  # noqa: BLE001 - it is only shown
        return f"{case!r:.500} ({error!r})"
