"""A service does not start where others can reach it without strong tokens; it says which setting, and the fix."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rlharvest.testing.servers import free_port

STRONG = "Zk3_u8Qe0vLw1sTnYcRb"
TOKENS = {"RLHARVEST_WORKER_TOKEN": STRONG, "RLHARVEST_SERVICE_TOKEN": STRONG[::-1]}


@pytest.mark.parametrize(
    ("program", "open_to_all", "tokens", "named"),
    [
        ("coordinator", {"RLHARVEST_API_HOST": "0.0.0.0"}, {}, "RLHARVEST_API_TOKEN"),
        ("coordinator", {"RLHARVEST_API_HOST": "0.0.0.0"}, {"RLHARVEST_API_TOKEN": "rlharvest"}, "api_token"),
        ("coordinator", {"RLHARVEST_GRPC_ADDRESS": "0.0.0.0:{port}"}, {"RLHARVEST_API_TOKEN": STRONG}, "WORKER_TOKEN"),
        ("weights", {"RLHARVEST_HTTP_HOST": "0.0.0.0"}, {}, "RLHARVEST_SERVICE_TOKEN"),
        (
            "weights",
            {"RLHARVEST_GRPC_ADDRESS": "0.0.0.0:{port}"},
            {**TOKENS, "RLHARVEST_WORKER_TOKEN": "short"},
            "weak",
        ),
    ],
)
@pytest.mark.timeout(300)
def test_a_service_refuses_to_be_reached_with_a_weak_token(
    tmp_path: Path, program: str, open_to_all: dict[str, str], tokens: dict[str, str], named: str
) -> None:
    port = free_port()
    variables = {name: value.format(port=port) for name, value in open_to_all.items()}
    done = subprocess.run(
        [Path(sys.executable).parent / f"rlharvest-{program}", "serve"],
        env={
            **os.environ,
            "RLHARVEST_DATA_DIR": str(tmp_path),
            "RLHARVEST_LOG_FORMAT": "console",
            "RLHARVEST_API_PORT": str(free_port()),
            "RLHARVEST_HTTP_PORT": str(free_port()),
            "RLHARVEST_GRPC_ADDRESS": f"127.0.0.1:{free_port()}",
            "RLHARVEST_NATS_URL": "nats://127.0.0.1:1",
            **variables,
            **tokens,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert named in said
    assert "rlharvest secrets" in said
    assert STRONG not in said
