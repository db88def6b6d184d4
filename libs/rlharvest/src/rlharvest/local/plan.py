"""What `rlharvest up` runs: every program with its command, environment, readiness and time limits. No I/O.

Start: NATS and Valkey; the database's migration, weights and reward; the coordinator, and trainers, which take as long
to load and wait for it; its standby; rollout workers. Stop: rollout, trainer, reward, weights, coordinator, Valkey,
NATS; a program is gone before what it needs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rlharvest import programs
from rlharvest.keyring import GIVEN, REDIS_USER, Keyring
from rlharvest.local.cores import threads
from rlharvest.local.launcher import Plan
from rlharvest.local.program import Http, Program, Redis

HOST = "127.0.0.1"
Role = Literal["coordinator", "weights", "reward", "trainer", "rollout"]
STOP_ORDER = ("rollout", "trainer", "reward", "weights", "coordinator", "valkey", "nats")


@dataclass(frozen=True)
class Options:
    """What the user chose."""

    data: Path
    """Absolute."""
    roots: tuple[Path, ...]
    """Directories that paths in jobs must lie in."""
    rollout: int = 2
    trainers: int = 1
    slots: int | None = None
    """Responses that a rollout worker runs at a time; None: the worker's own default."""
    standby: bool = False
    api_host: str = HOST
    log_level: str = "info"
    cores: int = 1
    threads: int | None = None
    """Of each torch process; None: an equal share of the cores."""


def port_names(options: Options) -> list[str]:
    """Return the names of the ports that these options need."""
    names = ["api", "nats", "nats-monitor", "valkey", "grpc", "weights-http", "weights-grpc"]
    names += ["coordinator-health", "reward-health"]
    if options.standby:
        names += ["standby-api", "standby-grpc", "standby-health"]
    names += [f"trainer-{number}-health" for number in range(1, options.trainers + 1)]
    return names


def api_url(options: Options, ports: Mapping[str, int]) -> str:
    """Return the address of REST and the web UI."""
    host = HOST if options.api_host in ("0.0.0.0", "::") else options.api_host  # noqa: S104 - asked for by the user
    return f"http://{host}:{ports['api']}"


def make(
    options: Options,
    ports: Mapping[str, int],
    *,
    nats: Path,
    valkey: Path,
    scripts: Path,
    worker_port: Callable[[int], int],
) -> Plan:
    """Return the plan.

    Args:
        ports: a port for each of `port_names`.
        nats, valkey: the server programs.
        scripts: directory of the services' console scripts.
        worker_port: gives the health port of rollout worker number n when it is about to start.
    """
    data = options.data
    grpc = [f"{HOST}:{ports['grpc']}"]
    if options.standby:
        grpc.append(f"{HOST}:{ports['standby-grpc']}")
    compute = str(options.threads or threads(options.cores, options.trainers + options.rollout))
    shared = {
        "RLHARVEST_NATS_URL": f"nats://{HOST}:{ports['nats']}",
        "RLHARVEST_REDIS_URL": f"redis://{REDIS_USER}@{HOST}:{ports['valkey']}/0",
        "RLHARVEST_COORDINATOR_GRPC": ",".join(grpc),
        "RLHARVEST_WEIGHTS_URL": f"http://{HOST}:{ports['weights-http']}",
        "RLHARVEST_WEIGHTS_GRPC": f"{HOST}:{ports['weights-grpc']}",
        "RLHARVEST_CHECKPOINTS_DIR": str(data / "checkpoints"),
        "RLHARVEST_ROOTS": json.dumps([str(root) for root in (*options.roots, data / "checkpoints")]),
        "RLHARVEST_LOG_FORMAT": "json",
        "RLHARVEST_LOG_LEVEL": options.log_level,
        "RLHARVEST_HEALTH_HOST": HOST,
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": compute,
    }

    secrets = Keyring(data / "secrets")
    # What the user's environment chose is in the directory; a child gets its own part of it from there alone. On one
    # machine nothing is encrypted.
    hidden = {f"RLHARVEST_{name.upper()}{end}": "" for name in GIVEN for end in ("", "_FILE")}
    hidden |= {"RLHARVEST_TLS_CA": "", "RLHARVEST_TLS_CERT": "", "RLHARVEST_TLS_KEY": ""}

    def service(name: str, role: Role, port: int, *, grace_s: float, **extra: str) -> Program:
        return Program(
            name=name,
            role=role,
            command=(sys.executable, str(scripts / f"rlharvest-{role}"), "serve"),
            environment={
                **shared,
                "RLHARVEST_DATA_DIR": str(data / (name if role in ("trainer", "rollout") else role)),
                "RLHARVEST_HEALTH_PORT": str(port),
                "RLHARVEST_SECRETS_DIR": str(secrets.holder(role)),
                **hidden,
                **extra,
            },
            probe=Http(f"http://{HOST}:{port}/readyz"),
            grace_s=grace_s,
            may_leave=role == "rollout",
        )

    def coordinator(name: str, prefix: str, host: str, *, path: str) -> Program:
        api = ports[f"{prefix}api"]
        program = service(
            name,
            "coordinator",
            ports["standby-health" if prefix else "coordinator-health"],
            grace_s=15.0,
            RLHARVEST_API_HOST=host,
            RLHARVEST_API_PORT=str(api),
            RLHARVEST_GRPC_ADDRESS=f"{HOST}:{ports[f'{prefix}grpc']}",
        )
        return replace(program, probe=Http(f"http://{HOST}:{api}{path}"))

    # With a standby either of them may lead after a restart, and the other is alive, not ready.
    first = coordinator("coordinator", "", options.api_host, path="/livez" if options.standby else "/readyz")
    migrate = Program(
        name="migrate",
        role="once",
        command=(*first.command[:-1], "migrate"),
        environment=first.environment,
    )
    weights = service(
        "weights",
        "weights",
        ports["weights-http"],  # blobs, health and metrics share a port
        grace_s=10.0,
        RLHARVEST_HTTP_PORT=str(ports["weights-http"]),
        RLHARVEST_GRPC_ADDRESS=f"{HOST}:{ports['weights-grpc']}",
    )
    reward = service(
        "reward",
        "reward",
        ports["reward-health"],
        grace_s=10.0,
        RLHARVEST_ROOTS=json.dumps([str(root) for root in options.roots]),
        RLHARVEST_REWARD_HIDDEN=json.dumps([str(data)]),
    )
    # It starts after the first one, which so comes to lead: the address that `up` prints is the leader's.
    standby = (coordinator("standby", "standby-", HOST, path="/livez"),) if options.standby else ()
    trainers = [
        service(
            f"trainer-{number}",
            "trainer",
            ports[f"trainer-{number}-health"],
            grace_s=60.0,
            RLHARVEST_TRAINER=f"trainer-{number}",
            RLHARVEST_THREADS=compute,
        )
        for number in range(1, options.trainers + 1)
    ]

    def worker(number: int) -> Program:
        extra = {"RLHARVEST_THREADS": compute, "RLHARVEST_CACHE_DIR": str(data / "versions")}
        if options.slots is not None:
            extra["RLHARVEST_SLOTS"] = str(options.slots)
        return service(f"rollout-{number}", "rollout", worker_port(number), grace_s=30.0, **extra)

    return Plan(
        stages=(
            _infrastructure(data, ports, nats, valkey),
            (migrate, weights, reward),
            (first, *trainers),
            standby,
        ),
        worker=worker,
        workers=options.rollout,
        stop_order=STOP_ORDER,
        url=api_url(options, ports),
    )


def _infrastructure(data: Path, ports: Mapping[str, int], nats: Path, valkey: Path) -> tuple[Program, Program]:
    monitor = ports["nats-monitor"]
    return (
        Program(
            name="nats",
            role="nats",
            command=(str(nats), "-c", str(data / "nats" / "nats.conf")),
            probe=Http(f"http://{HOST}:{monitor}/healthz?js-enabled-only=true"),
            quiet=True,
        ),
        Program(
            name="valkey",
            role="valkey",
            command=(
                str(valkey),
                *programs.valkey_arguments(
                    host=HOST,
                    port=ports["valkey"],
                    directory=data / "valkey",
                    users=data / "secrets" / "valkey" / "users.acl",
                ),
            ),
            probe=Redis(HOST, ports["valkey"]),
            quiet=True,
        ),
    )
