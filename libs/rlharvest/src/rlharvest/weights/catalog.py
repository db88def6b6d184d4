"""Which versions the weight service has, and the manifest of one."""

from __future__ import annotations

import asyncio

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from rlharvest.credentials import Caller
from rlharvest.errors import CorruptData, NotFound, Unavailable
from rlharvest.weights.manifest import Manifest


class VersionEntry(BaseModel):
    """One line of the list of versions."""

    model_config = ConfigDict(frozen=True)

    version: int
    step: int
    parent: int | None
    digest: str
    bytes: int
    created_at: float


class VersionList(BaseModel):
    """The versions of a job that can be pulled, oldest first."""

    data: tuple[VersionEntry, ...]


async def list_versions(
    base_url: str, job: str, *, total_s: float = 30.0, caller: Caller | None = None
) -> tuple[VersionEntry, ...]:
    """Return the versions of a job that can be pulled, oldest first; none if the service does not know the job.

    Raises:
        Unavailable: no answer within `total_s`.
        CorruptData: an answer that is no list of versions.
    """
    body = await _get(f"{base_url.rstrip('/')}/v1/jobs/{job}/versions", total_s, caller)
    try:
        return VersionList.model_validate_json(body).data
    except ValidationError as error:
        raise CorruptData(f"{base_url} answers with something that is no list of versions: {error}") from error


async def fetch_manifest(
    base_url: str, job: str, version: int, *, total_s: float = 30.0, caller: Caller | None = None
) -> Manifest:
    """Return the manifest of a version.

    Raises:
        NotFound: the service has no such version (any more).
        Unavailable: no answer within `total_s`.
        CorruptData: an answer that is no manifest, or another version's.
    """
    body = await _get(f"{base_url.rstrip('/')}/v1/jobs/{job}/versions/{version}", total_s, caller)
    try:
        manifest = Manifest.model_validate_json(body)
    except ValidationError as error:
        raise CorruptData(f"{base_url} answers with something that is no manifest: {error}") from error
    if (manifest.job, manifest.version) != (job, version):
        raise CorruptData(
            f"{base_url} answers with version {manifest.version} of {manifest.job}; asked for {version} of {job}"
        )
    return manifest


_NOBODY = Caller()
"""Kept, since reading the system's certificates takes 50 ms of the event loop."""


async def _get(url: str, total_s: float, caller: Caller | None) -> bytes:
    caller = caller or _NOBODY
    loop = asyncio.get_running_loop()
    end = loop.time() + total_s
    wait = 0.05
    async with httpx.AsyncClient(trust_env=False, verify=caller.tls.client, timeout=min(10.0, total_s)) as client:
        while True:
            problem: object
            try:
                reply = await client.get(url, headers=caller.headers)
                if reply.status_code == 200:
                    return reply.content
                problem = f"status {reply.status_code}"
                if reply.status_code == 404:
                    raise NotFound(f"{url}: there is no such thing")
            except httpx.TransportError as error:
                problem = repr(error)
            if loop.time() + wait >= end:
                raise Unavailable(f"{url} did not answer in {total_s:g} s: {problem}")
            await asyncio.sleep(wait)
            wait = min(2 * wait, 2.0)
