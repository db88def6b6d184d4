"""The HTTP side: blobs by range, manifests, health and metrics on one port.

Invariants: a blob never changes, so its strong ETag is its digest and it may be cached for ever; what is sent goes from
the file to the socket inside the kernel (sendfile, which asyncio's own loop has and uvloop lacks); an upload exists
only after every byte of it verified; errors have the form {"error": {"code", "message", "param", "type"}}.

aiohttp's FileResponse is not used: its ETag is made of time and size, it reads If-Range as a date only (so that a range
of another file would be sent), and it answers 416 where RFC 9110 wants the whole.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import prometheus_client
import structlog
from aiohttp import ClientError, web
from rlharvest.access import Access
from rlharvest.credentials import bearer
from rlharvest.errors import (
    Conflict,
    DataError,
    DiskFull,
    InvalidField,
    LimitReached,
    NotFound,
    RlharvestError,
    Unavailable,
)
from rlharvest.health import Health
from rlharvest.weights.ranges import select

from rlharvest_weights import metrics
from rlharvest_weights.blobs import BlobStore, Upload
from rlharvest_weights.versions import VersionStore

log = structlog.get_logger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{64}")
_IMMUTABLE = "public, max-age=31536000, immutable"
_WRITE_BYTES = 4 << 20
"""Bytes that are hashed and written at once, in a thread."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DataPlane:
    """The web application.

    Args:
        max_blob_bytes: larger uploads are refused with 413.
        upload_idle_s: an upload that brings no byte for this long is refused with 408.
        access: whom it takes.
    """

    def __init__(
        self,
        blobs: BlobStore,
        versions: VersionStore,
        health: Health,
        *,
        max_blob_bytes: int,
        upload_idle_s: float,
        access: Access | None = None,
    ) -> None:
        self._blobs = blobs
        self._versions = versions
        self._health = health
        self._max_blob_bytes = max_blob_bytes
        self._upload_idle_s = upload_idle_s
        self._access = access or Access()
        self.app = web.Application(middlewares=[_errors, self._gate])
        self.app.add_routes(
            [
                web.get("/v1/blobs/{digest}", self._get_blob),
                web.put("/v1/blobs/{digest}", self._put_blob),
                web.get("/v1/jobs/{job}/versions", self._list_versions),
                web.get("/v1/jobs/{job}/versions/{number}", self._get_version),
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
            ]
        )

    @web.middleware
    async def _gate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse who may not come in, before any of the body is read."""
        given = bearer(request.headers.get("Authorization", ""))
        verdict = self._access.http(request.method, request.path, given)
        if verdict is None:
            return await handler(request)
        if verdict.kind == "unknown":
            return _refusal(401, verdict.message, headers={"WWW-Authenticate": "Bearer"})
        return _refusal(403, verdict.message)

    async def _get_blob(self, request: web.Request) -> web.StreamResponse:
        digest = _digest(request)
        etag = f'"{digest}"'
        headers = {"ETag": etag, "Cache-Control": _IMMUTABLE, "Accept-Ranges": "bytes"}
        if request.method == "HEAD":
            await asyncio.to_thread(self._blobs.renew, digest)
        file = await asyncio.to_thread(self._blobs.open, digest)
        with file:
            size = file.seek(0, 2)
            if _matches(request.headers.get("If-None-Match"), etag):
                return web.Response(status=304, headers=headers)
            span = select(size, etag, request.headers.get("Range"), request.headers.get("If-Range"))
            if span is None:
                problem = f"the blob has {size} bytes; {request.headers['Range']!r} lies outside"
                return _refusal(416, problem, param="Range", headers={**headers, "Content-Range": f"bytes */{size}"})
            response = web.StreamResponse(status=206 if span.partial else 200, headers=headers)
            if span.partial:
                response.headers["Content-Range"] = f"bytes {span.start}-{span.end - 1}/{size}"
            count = span.end - span.start
            response.content_type = "application/octet-stream"
            response.content_length = count
            try:
                await response.prepare(request)
                # sendfile refuses to send nothing.
                if request.method != "HEAD" and count:
                    if request.transport is None:
                        raise ConnectionResetError("the client went away")
                    await asyncio.get_running_loop().sendfile(request.transport, file, span.start, count)
                    metrics.SENT_BYTES.inc(count)
                await response.write_eof()
            except ConnectionError as error:
                # It asks again for what it lacks; there is nobody left to answer.
                log.debug("blob.cut", digest=digest, error=repr(error))
        return response

    async def _put_blob(self, request: web.Request) -> web.StreamResponse:
        digest = _digest(request)
        headers = {"ETag": f'"{digest}"', "Location": f"/v1/blobs/{digest}"}
        size = request.content_length
        if request.headers.get("Content-Encoding", "identity") != "identity":
            return _refusal(415, "blobs are taken as they are, without Content-Encoding", param="Content-Encoding")
        if size is not None and size > self._max_blob_bytes:
            return self._too_large(size)
        if await asyncio.to_thread(self._blobs.renew, digest):
            await self._discard(request)
            return web.Response(status=200, headers=headers)
        upload = await asyncio.to_thread(self._blobs.begin, digest, size)
        try:
            if not await self._receive(request, upload):
                return self._too_large(upload.received)
            new = await asyncio.to_thread(upload.commit)
        except (ClientError, ConnectionError) as error:
            log.info("upload.cut", digest=digest, received=upload.received, error=repr(error))
            return _refusal(400, "the upload broke off")
        except TimeoutError:
            return _refusal(408, f"the upload brought no byte for {self._upload_idle_s:g} s")
        finally:
            await asyncio.to_thread(upload.abort)
        metrics.RECEIVED_BYTES.inc(upload.received)
        return web.Response(status=201 if new else 200, headers=headers)

    async def _receive(self, request: web.Request, upload: Upload) -> bool:
        """Bring the body into the upload; return False as soon as it is too large."""
        waiting = bytearray()
        while True:
            async with asyncio.timeout(self._upload_idle_s):
                data = await request.content.readany()
            waiting += data
            if len(waiting) >= _WRITE_BYTES or not data:
                if upload.received + len(waiting) > self._max_blob_bytes:
                    return False
                await asyncio.to_thread(upload.write, waiting)
                waiting = bytearray()
            if not data:
                return True

    async def _discard(self, request: web.Request) -> None:
        async with asyncio.timeout(self._upload_idle_s):
            async for _ in request.content.iter_any():
                pass

    def _too_large(self, size: int) -> web.Response:
        return _refusal(
            413,
            f"{size} bytes are too many; the limit is {self._max_blob_bytes}. Write smaller shards, or set "
            "RLHARVEST_MAX_BLOB_BYTES on the weight service",
        )

    async def _list_versions(self, request: web.Request) -> web.Response:
        data = [
            {
                "version": manifest.version,
                "step": manifest.step,
                "parent": manifest.parent,
                "digest": manifest.digest,
                "bytes": manifest.bytes,
                "created_at": manifest.created_at,
            }
            for manifest in self._versions.listed(request.match_info["job"])
        ]
        return web.json_response({"object": "list", "data": data}, headers={"Cache-Control": "no-store"})

    async def _get_version(self, request: web.Request) -> web.Response:
        text = request.match_info["number"]
        if not re.fullmatch(r"\d{1,10}", text, re.ASCII):
            raise InvalidField("version", text, "not a version number", "Give a number from 0 on")
        manifest = self._versions.get(request.match_info["job"], int(text))
        return web.Response(text=manifest.model_dump_json(), content_type="application/json")

    async def _livez(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readyz(self, request: web.Request) -> web.Response:
        failed = await self._health.failures()
        return web.json_response(
            {"status": "unready" if failed else "ok", "failed": failed}, status=503 if failed else 200
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        versions, size = self._versions.count()
        metrics.VERSIONS.set(versions)
        metrics.VERSION_BYTES.set(size)
        metrics.FREE_BYTES.set(await asyncio.to_thread(self._blobs.free_bytes))
        return web.Response(
            body=prometheus_client.generate_latest(), headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST}
        )


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into the envelope, and count."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = _refusal(error.status, error.reason)
    except RlharvestError as error:
        param = error.field if isinstance(error, InvalidField) else None
        wait = {"Retry-After": "1"} if isinstance(error, LimitReached) else None
        response = _refusal(_status(error), str(error), param=param, headers=wait)
    except TimeoutError:
        response = _refusal(408, "the request brought no byte for too long")
    except Exception:
        log.exception("request.failed", method=request.method, path=request.path)
        response = _refusal(500, "internal error; the service's log says more")
    metrics.REQUESTS.labels(request.method, str(response.status)).inc()
    return response


def _status(error: RlharvestError) -> int:
    match error:
        case DataError():
            return 400
        case NotFound():
            return 404
        case Conflict():
            return 409
        case DiskFull():
            return 507
        case LimitReached() | Unavailable():
            return 503
    return 500


def _refusal(
    status: int, message: str, *, param: str | None = None, headers: dict[str, str] | None = None
) -> web.Response:
    codes = {400: "invalid_value", 401: "unauthorized", 403: "forbidden"}
    codes |= {404: "not_found", 405: "method_not_allowed", 409: "conflict", 413: "too_large"}
    codes |= {408: "timeout", 415: "unsupported", 416: "range_not_satisfiable", 503: "unavailable", 507: "disk_full"}
    body = {
        "code": codes.get(status, "internal_error" if status >= 500 else "refused"),
        "message": message,
        "param": param,
        "type": "server_error" if status >= 500 else "invalid_request_error",
    }
    return web.json_response({"error": body}, status=status, headers=headers)


def _digest(request: web.Request) -> str:
    digest = request.match_info["digest"]
    if not _DIGEST.fullmatch(digest):
        raise InvalidField("digest", digest, "not a blake3", "Give 64 lower-case hexadecimal digits")
    return digest


def _matches(header: str | None, etag: str) -> bool:
    """Whether If-None-Match names the entity tag, weakly compared."""
    return header is not None and etag in [tag.strip().removeprefix("W/") for tag in header.split(",")]
