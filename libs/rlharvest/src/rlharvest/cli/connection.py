"""Which server a command speaks to, and which job a short name means."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rlharvest.client import Client
from rlharvest.errors import InvalidField, NotFound
from rlharvest.keyring import Keyring
from rlharvest.local.datadir import DataDirectory

DEFAULT_URL = "http://127.0.0.1:8080"
_ID_LENGTH = len("rljob_") + 26

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="RLHARVEST_URL",
        help="Server. Unset: the `rlharvest up` of this directory, else " + DEFAULT_URL,
        show_default=False,
    ),
]
Token = Annotated[
    str | None,
    typer.Option("--token", envvar="RLHARVEST_TOKEN", help="Bearer token. Unset: that of the `rlharvest up` here."),
]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Id, a unique start or end of it, or `last`.")]


def connect(url: str | None, token: str | None) -> Client:
    """Return a client of the server that is meant."""
    here, its_token = local_server(Path.cwd())
    address = url or here or DEFAULT_URL
    authority = os.environ.get("RLHARVEST_TLS_CA")
    return Client(
        address,
        token or (its_token if address == here else None),
        retry_s=5.0,
        ca=Path(authority) if authority else None,
    )


def local_server(directory: Path) -> tuple[str | None, str | None]:
    """Return address and token of the `rlharvest up` whose data directory is the usual one here, if one runs.

    The token is None for who may not read it.
    """
    data = DataDirectory(Path(os.environ.get("RLHARVEST_DATA_DIR") or directory / ".rlharvest"))
    running: Mapping[str, Any] = data.read("up.json")
    try:
        os.kill(int(running["pid"]), 0)
    except (KeyError, ValueError, OSError):
        return None, None
    try:
        token = Keyring(data.secrets).token("api_token")
    except (OSError, IndexError):
        token = None
    return str(running["url"]), token


def pick(jobs: Iterable[Mapping[str, Any]], name: str) -> str:
    """Return the id of the job that a short name means; `jobs` come newest first.

    Raises:
        NotFound: none is meant.
        InvalidField: several are; names them.
    """
    name = name.removeprefix("…")
    known = [str(job["id"]) for job in jobs]
    if name == "last":
        if not known:
            raise NotFound("there is no job yet. Submit one: rlharvest submit job.yaml")
        return known[0]
    if name in known:
        return name
    found = [one for one in known if one.startswith((name, f"rljob_{name}")) or one.endswith(name)]
    if not found:
        raise NotFound(f"there is no job {name!r}; `rlharvest jobs` lists them")
    if len(found) > 1:
        shown = ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
        raise InvalidField("JOB", name, f"{len(found)} jobs are meant: {shown}", "Give more of the id.")
    return found[0]


def resolve(client: Client, name: str) -> str:
    """Return the id of the job that `name` means. Raises as `pick`."""
    if name.startswith("rljob_") and len(name) == _ID_LENGTH:
        return name
    return pick(client.list_jobs(limit=1 if name == "last" else 1000), name)
