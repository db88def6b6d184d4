"""What docker-compose.yml promises, read from the file; tests/e2e/test_compose.py runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
ONCE = {"secrets", "migrate", "backup", "restore"}
"""They do one thing and end."""
GPU = {"trainer-gpu": "RLHARVEST_TRAINER_GPU", "rollout-gpu": "RLHARVEST_ROLLOUT_GPU"}


def test_only_the_api_is_published_and_only_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"coordinator": ["127.0.0.1:${RLHARVEST_PORT:-8080}:8080"]}
    assert all(service.get("network_mode", "none") == "none" for service in SERVICES.values())


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_has_its_limits(name: str) -> None:
    """A health check unless it ends by itself, no new privileges, no capabilities, logs that do not fill the disk."""
    service = SERVICES[name]
    assert ("healthcheck" in service) == (name not in ONCE)
    assert service["restart"] == ("no" if name in ONCE else "unless-stopped")
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service.get("cap_drop") == (None if name == "valkey" else ["ALL"])
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}
    assert "privileged" not in service


def test_each_service_sees_its_own_secrets_alone_and_cannot_change_them() -> None:
    holders = {"migrate": "coordinator", "backup": "coordinator", "restore": "coordinator"}
    holders |= {name: name.removesuffix("-gpu") for name in GPU}
    for name, service in SERVICES.items():
        mounts = [volume for volume in service.get("volumes", ()) if volume.startswith("secrets-")]
        if name == "secrets":
            assert len(mounts) == sum(volume.startswith("secrets-") for volume in FILE["volumes"])
        elif name != "prometheus":
            (mount,) = mounts
            assert mount.partition(":")[0] == f"secrets-{holders.get(name, name)}"
            assert mount.endswith(":ro,nocopy")


def test_what_must_survive_lies_in_named_volumes() -> None:
    for service, path in {
        "nats": "/data",
        "valkey": "/data",
        "postgres": "/var/lib/postgresql/data",
        "coordinator": "/checkpoints",
        "trainer": "/checkpoints",
        "weights": "/data",
    }.items():
        (source,) = (mount.split(":")[0] for mount in SERVICES[service]["volumes"] if mount.split(":")[1] == path)
        assert source in FILE["volumes"]


@pytest.mark.parametrize(("name", "variable"), GPU.items())
def test_the_gpu_profile_reserves_one_device_a_service(name: str, variable: str) -> None:
    service = SERVICES[name]
    assert service["profiles"] == ["gpu"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    (chosen,) = device["device_ids"]
    assert chosen.startswith(f"${{{variable}:-")
    assert service["image"] != SERVICES[name.removesuffix("-gpu")]["image"], "a CPU build of torch would be taken"


def test_prometheus_asks_the_dns_for_every_service_of_ours() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text(encoding="utf-8"))
    asked: dict[str, int] = {}
    for job in config["scrape_configs"]:
        (discovery,) = job["dns_sd_configs"]
        assert discovery["type"] == "A"
        asked |= dict.fromkeys(discovery["names"], discovery["port"])
    ours = {name for name, service in SERVICES.items() if service["image"].startswith("rlharvest-")} - ONCE
    assert asked.keys() == ours
    assert {name: port for name, port in asked.items() if port != 8081} == {"weights": 7083}
