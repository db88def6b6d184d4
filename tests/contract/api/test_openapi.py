"""The description of REST: fresh, complete, true, and readable without a network."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rlharvest.health import Health
from rlharvest_coordinator import migrations, sql
from rlharvest_coordinator.api import openapi
from rlharvest_coordinator.api.app import create_app, describe
from rlharvest_coordinator.live import LiveJob, LiveWorker
from rlharvest_coordinator.settings import CoordinatorSettings

COMMITTED = Path(__file__).parents[3] / "docs" / "openapi.json"

ROUTES = {
    "GET /livez": "livez",
    "GET /metrics": "prometheus",
    "GET /readyz": "readyz",
    "GET /v1/fine_tuning/jobs": "list_fine_tuning_jobs",
    "GET /v1/fine_tuning/jobs/{job}": "get_fine_tuning_job",
    "GET /v1/fine_tuning/jobs/{job}/checkpoints": "list_fine_tuning_checkpoints",
    "GET /v1/fine_tuning/jobs/{job}/events": "list_fine_tuning_events",
    "POST /v1/fine_tuning/jobs": "create_fine_tuning_job",
    "POST /v1/fine_tuning/jobs/{job}/cancel": "cancel_fine_tuning_job",
    "POST /v1/fine_tuning/jobs/{job}/pause": "pause_fine_tuning_job",
    "POST /v1/fine_tuning/jobs/{job}/resume": "resume_fine_tuning_job",
    "DELETE /v1/jobs/{job}": "delete_job",
    "GET /v1/audit": "list_audit",
    "GET /v1/jobs": "list_jobs",
    "GET /v1/jobs/{job}": "get_job",
    "GET /v1/jobs/{job}/checkpoints": "list_checkpoints",
    "GET /v1/jobs/{job}/events": "list_events",
    "GET /v1/jobs/{job}/metrics": "get_metrics",
    "GET /v1/jobs/{job}/samples": "list_samples",
    "GET /v1/jobs/{job}/samples/{response}": "get_sample",
    "POST /v1/chat/completions": "create_chat_completion",
    "POST /v1/completions": "create_completion",
    "POST /v1/jobs": "create_job",
    "POST /v1/jobs/{job}/cancel": "cancel_job",
    "POST /v1/jobs/{job}/pause": "pause_job",
    "POST /v1/jobs/{job}/resume": "resume_job",
    "GET /v1/models": "list_models",
    "GET /v1/models/{model}": "get_model",
    "GET /v1/weights/{job}": "list_versions",
    "GET /v1/workers": "list_workers",
    "GET /v1/workers/{worker}": "get_worker",
    "POST /v1/workers/{worker}/drain": "drain_worker",
}


class Idle:
    """Implements LiveView: leads, runs nothing."""

    leading = True
    epoch = 1

    def job(self, job: str) -> LiveJob | None:
        return None

    def workers(self) -> list[LiveWorker]:
        return []

    async def drain(self, worker: str, reason: str) -> None:
        raise AssertionError(worker)

    async def live_sample(self, job: str, handle: int) -> dict[str, Any] | None:
        return None

    async def live_samples(self, job: str, limit: int) -> list[dict[str, Any]]:
        return []

    def wake(self, job: str) -> None:
        pass


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    url = f"sqlite+aiosqlite:///{tmp_path / 'contract.sqlite3'}"
    await migrations.migrate(url)
    engine = sql.connect(url)
    app = create_app(CoordinatorSettings(data_dir=tmp_path), sql.sessions(engine), Idle(), Health())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        yield http
    await engine.dispose()


def test_the_committed_description_is_fresh() -> None:
    advice = "run: python -m rlharvest_coordinator.api.openapi > docs/openapi.json"
    assert COMMITTED.read_text(encoding="utf-8") == openapi.text(), advice


def test_the_routes_are_these_and_no_others() -> None:
    found = {
        f"{method.upper()} {path}": operation["operationId"]
        for path, item in describe()["paths"].items()
        for method, operation in item.items()
    }
    assert found == ROUTES


def test_every_operation_and_its_errors_are_described() -> None:
    description = describe()
    for path, item in description["paths"].items():
        for operation in item.values():
            assert operation["summary"]
            assert operation["description"], path
            if path.startswith("/v1/"):
                schema = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorBody"}
            assert "422" not in operation["responses"], f"{path}: what is invalid is answered with 400"
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', openapi.text()))
    assert references <= set(description["components"]["schemas"])


async def test_pages_load_everything_from_this_server(client: httpx.AsyncClient) -> None:
    for page in ("/", "/jobs/rljob_x", "/docs"):
        reply = await client.get(page)
        assert reply.status_code == 200
        assert not re.search(r"(?:https?:)?//[a-z0-9]", reply.text), page
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "<script>" not in reply.text, "the policy allows no script in a page"
        assert " style=" not in reply.text
        for asset in re.findall(r'(?:src|href)="(/static/[^"]+)"', reply.text):
            assert (await client.get(asset)).status_code == 200, asset


async def test_what_a_page_is_given_is_escaped(client: httpx.AsyncClient) -> None:
    page = (await client.get('/jobs/"><script>alert(1)')).text
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert" not in page
