"""`rlharvest doctor`: what this machine has and lacks for `rlharvest up`, one finding a line, each with its fix."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from rlharvest import programs
from rlharvest.errors import NotFound
from rlharvest.local import ports
from rlharvest.local.cores import cores, threads
from rlharvest.local.datadir import DataDirectory
from rlharvest.local.up import SERVICES

Level = Literal["ok", "warn", "fail"]
GIB = 1 << 30
_NATS_OLDEST = (2, 11)
_REDIS_OLDEST = (7, 0)


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    name: str
    level: Level
    found: str
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        """For `--json`."""
        return asdict(self)


def examine(data: Path) -> list[Finding]:
    """Run all checks.

    Args:
        data: the data directory that `up` would use.
    """
    findings = [_python(), *_distributions(), _torch()]
    findings.append(_server("nats-server", programs.nats_server, ["-v"], _NATS_OLDEST))
    findings.append(_server("valkey-server", programs.valkey_server, ["--version"], _REDIS_OLDEST))
    findings.append(_directory(data))
    findings += _ports(data)
    findings += [_disk(data), _memory(), _cores(), _docker()]
    return findings


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _distributions() -> list[Finding]:
    findings = []
    own = importlib.metadata.version("rlharvest")
    for name in ("rlharvest", *(f"rlharvest-{service}" for service in SERVICES)):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(name, "fail", "not installed", "Run: pip install 'rlharvest[local]'"))
            continue
        if version != own:
            findings.append(
                Finding(name, "fail", f"{version}, but rlharvest is {own}", f"Run: pip install {name}=={own}")
            )
        else:
            findings.append(Finding(name, "ok", version))
    return findings


def _torch() -> Finding:
    try:
        return Finding("torch", "ok", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("torch", "fail", "not installed", "Run: pip install torch")


def parse_version(text: str) -> tuple[int, ...]:
    """Return the first dotted number of a program's answer: `nats-server: v2.15.1` is (2, 15, 1)."""
    for word in text.replace("=", " ").replace(":", " ").split():
        parts = word.lstrip("v").split(".")
        if len(parts) > 1 and all(part.isdigit() for part in parts):
            return tuple(int(part) for part in parts)
    return ()


def _server(name: str, find: Callable[[], Path], arguments: list[str], oldest: tuple[int, ...]) -> Finding:
    try:
        path = find()
        done = subprocess.run([str(path), *arguments], capture_output=True, text=True, timeout=10, check=False)
    except NotFound as error:
        return Finding(name, "fail", "not found", str(error))
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(name, "fail", f"does not run: {error}", f"Install another {name}, or put a working one on PATH.")
    version = parse_version(done.stdout or done.stderr)
    shown = f"{'.'.join(map(str, version)) or 'unknown version'} at {path}"
    if version < oldest:
        wanted = ".".join(map(str, oldest))
        return Finding(
            name, "fail", shown, f"Version {wanted} or newer is needed: take it off PATH to use the wheel's."
        )
    return Finding(name, "ok", shown)


def _directory(data: Path) -> Finding:
    running = DataDirectory(data).read("up.json")
    if running and psutil.pid_exists(int(running.get("pid", 0))):
        return Finding("data directory", "ok", f"{data}, in use by pid {running['pid']} ({running.get('url')})")
    place = data
    while not place.exists() and place != place.parent:
        place = place.parent
    probe = place / f".rlharvest-doctor-{platform.node()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        return Finding("data directory", "fail", f"{data}: {error.strerror}", "Choose another one with --data.")
    return Finding("data directory", "ok", str(data))


def _ports(data: Path) -> list[Finding]:
    directory = DataDirectory(data)
    if directory.read("up.json"):
        return []  # its own ports are in use, as they should be
    remembered = directory.read("ports.json")
    findings = []
    for name, default in ports.DEFAULTS.items():
        port = remembered.get(name, default)
        if ports.is_free(port):
            findings.append(Finding(f"port {port}", "ok", f"free, for {name}"))
        elif name == "api":
            fix = f"Stop that, or run: rlharvest up --port {port + 1} (0: any free one)"
            findings.append(Finding(f"port {port}", "fail", f"{name}: in use by {ports.holder(port)}", fix))
        else:
            fix = "`up` takes another one by itself."
            findings.append(Finding(f"port {port}", "warn", f"{name}: in use by {ports.holder(port)}", fix))
    return findings


def _disk(data: Path) -> Finding:
    place = data
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    shown = f"{free / GIB:.1f} GiB free at {place}"
    if free < GIB:
        return Finding("disk", "fail", shown, "Free at least 1 GiB, or choose another disk with --data.")
    if free < 10 * GIB:
        return Finding("disk", "warn", shown, "Versions and checkpoints of a large model need more.")
    return Finding("disk", "ok", shown)


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    shown = f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f}"
    if memory.available < 2 * GIB:
        fix = "Close other programs, or run fewer workers: rlharvest up --rollout 1"
        return Finding("memory", "warn" if memory.available > GIB else "fail", shown, fix)
    return Finding("memory", "ok", shown)


def _cores() -> Finding:
    count = cores()
    share = threads(count, 3)
    shown = f"{count}; one trainer and two workers get {share} thread{'s' if share > 1 else ''} each"
    if count < 2:
        return Finding("cores", "warn", shown, "It works, slowly. Two or more are better.")
    return Finding("cores", "ok", shown)


def _docker() -> Finding:
    program = shutil.which("docker")
    if program is None:
        return Finding("docker", "ok", "not installed; only `docker compose up` needs it")
    try:
        done = subprocess.run(
            [program, "compose", "version", "--short"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return Finding("docker", "warn", f"{program} does not answer", "Only `docker compose up` needs it.")
    if done.returncode != 0:
        return Finding("docker", "warn", "without Compose v2", "Only `docker compose up` needs it.")
    return Finding("docker", "ok", f"Compose {done.stdout.strip()}")
