"""The REST API from Python: what the command line is built on.

Invariants: every call has a deadline; a call that the server may already have done is sent again only if doing it twice
is the same as doing it once (a job is created under an idempotency key, always); errors are those of rlharvest.errors
with the server's own message. Answers are the JSON objects that /docs describes, as dicts.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from rlharvest.errors import Conflict, DataError, InfrastructureError, NotFound, NotLeader, RlharvestError, Unavailable
from rlharvest.tls import Tls

Json = dict[str, Any]

PAGE = 100
"""Rows that one request for a list asks for."""

STREAM_SILENCE_S = 30.0
"""An event stream without a line for this long is opened again; the server sends a comment every 10 s."""

_CONNECT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""The request never left."""


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event of a text/event-stream."""

    id: str
    name: str
    data: str


def lines(chunks: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text that comes in pieces; only LF and CR LF end one (str.splitlines knows more)."""
    rest = ""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split("\n")
        for line in whole:
            yield line.removesuffix("\r")


def sse_events(text: Iterable[str]) -> Iterator[ServerSentEvent]:
    """Yield the events of a text/event-stream given as lines (WHATWG HTML, 9.2.6); an unfinished one is dropped."""
    identifier, name = "", ""
    data: list[str] = []
    for line in text:
        if not line:
            if data:
                yield ServerSentEvent(identifier, name or "message", "\n".join(data))
            name, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "id":
            identifier = value
        elif field == "event":
            name = value
        elif field == "data":
            data.append(value)


class Client:
    """A rlharvest server.

    Example::

        with Client("http://127.0.0.1:8080") as client:
            job = client.create_job({"model": "model", "dataset": {...}, "rewards": [...]})
            for event in client.events(job["id"], follow=True):
                print(event["message"])

    Args:
        url: where the server is; a path is kept as a prefix.
        token: bearer token, if the server asks for one.
        timeout_s: longest time for one try of a call.
        retry_s: how long a call that may be sent again is tried while nobody answers.
        ca: PEM file of the authorities to believe, for an https:// URL; None: those of the system.
        transport: how requests travel, for tests.

    Raises (every call):
        Unavailable: nobody answers, or the server failed.
        NotLeader: the server answers, but another coordinator leads, also after `retry_s`.
        NotFound: there is no such job, sample or worker.
        Conflict: the present state does not allow it.
        DataError: what was given is wrong; the message names the field, the value and the fix.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        retry_s: float = 10.0,
        ca: Path | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.token = token
        self.retry_s = retry_s
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            verify=True if ca is None else Tls(ca).client,
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def create_job(self, spec: Mapping[str, Any], *, idempotency_key: str | None = None) -> Json:
        """Create a job; the same key and spec give the same job again, the same key and another spec raise Conflict.

        Without a key one is made up, so that a lost answer never makes two jobs.
        """
        key = idempotency_key or str(uuid.uuid4())
        return self._call("POST", "/v1/jobs", body=dict(spec), headers={"Idempotency-Key": key}, again=True)

    def get_job(self, job: str) -> Json:
        """Return a job."""
        return self._call("GET", f"/v1/jobs/{_part(job)}")

    def list_jobs(self, *, status: str | None = None, limit: int | None = None) -> Iterator[Json]:
        """Yield jobs, newest first, at most `limit`."""
        return self._pages("/v1/jobs", {"status": status}, limit)

    def cancel(self, job: str) -> Json:
        """End a job; return it as it is now. Cancelling twice is the same as once."""
        return self._call("POST", f"/v1/jobs/{_part(job)}/cancel", again=True)

    def pause(self, job: str) -> Json:
        """Pause a job; return it as it is now. Pausing twice is the same as once."""
        return self._call("POST", f"/v1/jobs/{_part(job)}/pause", again=True)

    def resume(self, job: str) -> Json:
        """Go on with a paused job; return it as it is now."""
        return self._call("POST", f"/v1/jobs/{_part(job)}/resume")

    def delete(self, job: str, *, checkpoints: bool = False) -> Json:
        """Delete a job that has ended; return `{"id", "object", "deleted", "checkpoints"}`.

        Args:
            checkpoints: also the files of its checkpoints; else the answer says where they are.
        """
        parameters = {"checkpoints": True} if checkpoints else None
        return self._call("DELETE", f"/v1/jobs/{_part(job)}", parameters=parameters)

    def events(
        self, job: str, *, after: int = 0, follow: bool = False, silence_s: float = STREAM_SILENCE_S
    ) -> Iterator[Json]:
        """Yield the events of a job in order.

        Args:
            after: the `number` of the last event already seen.
            follow: go on until the job has ended, over broken connections and restarts of the server.
            silence_s: with `follow`, longest time without a sign of life before it connects again.

        Raises:
            Unavailable: with `follow`, nobody answered for `retry_s`.
        """
        if not follow:
            yield from self._pages(f"/v1/jobs/{_part(job)}/events", {"after": after}, None, cursor="number")
            return
        lost_at: float | None = None
        while True:
            try:
                for event in self._stream(f"/v1/jobs/{_part(job)}/events", after, silence_s):
                    lost_at = None
                    if event.name == "end":
                        return
                    value = json.loads(event.data)
                    after = value["number"]
                    yield value
            except httpx.HTTPError as error:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > self.retry_s:
                    raise Unavailable(f"{self.url} does not answer: {error}") from error
            except (NotLeader, Unavailable):
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > self.retry_s:
                    raise
            time.sleep(0.2)

    def metrics(
        self, job: str, *, names: Sequence[str] | None = None, from_step: int = 0, max_points: int | None = None
    ) -> Json:
        """Return the curves of a job: `{"steps": [...], "series": {name: [value or None, ...]}}`, all of one length."""
        parameters = {
            "names": ",".join(names) if names else None,
            "from_step": from_step,
            "max_points": max_points,
        }
        return self._call("GET", f"/v1/jobs/{_part(job)}/metrics", parameters=parameters)

    def samples(
        self, job: str, *, step: int | None = None, min_reward: float | None = None, limit: int = 20
    ) -> list[Json]:
        """Return finished responses, newest first, with text and reward (no tokens: see `sample`)."""
        parameters = {"step": step, "min_reward": min_reward}
        return list(self._pages(f"/v1/jobs/{_part(job)}/samples", parameters, limit))

    def live_samples(self, job: str, *, limit: int = 100) -> list[Json]:
        """Return responses that are still being generated or scored, newest first."""
        return list(self._pages(f"/v1/jobs/{_part(job)}/samples", {"state": "live"}, limit))

    def sample(self, job: str, response: str) -> Json:
        """Return one response with tokens, log-probabilities, version runs, and who generated what."""
        return self._call("GET", f"/v1/jobs/{_part(job)}/samples/{_part(response)}")

    def checkpoints(self, job: str) -> list[Json]:
        """Return the checkpoints of a job, newest first."""
        return list(self._pages(f"/v1/jobs/{_part(job)}/checkpoints", {}, None))

    def weights(self, job: str) -> list[Json]:
        """Return the versions of a job that can be pulled, oldest first."""
        data: list[Json] = self._call("GET", f"/v1/weights/{_part(job)}")["data"]
        return data

    def workers(self) -> list[Json]:
        """Return the workers: those that are here first, then those that left."""
        data: list[Json] = self._call("GET", "/v1/workers")["data"]
        return data

    def worker(self, worker: str) -> Json:
        """Return one worker."""
        return self._call("GET", f"/v1/workers/{_part(worker)}")

    def drain(self, worker: str, *, reason: str = "") -> Json:
        """Tell a worker to stop, hand back what it holds, and leave."""
        return self._call("POST", f"/v1/workers/{_part(worker)}/drain", body={"reason": reason}, again=True)

    def audit(self, *, subject: str | None = None, limit: int | None = None) -> Iterator[Json]:
        """Yield the calls that changed something or were refused, newest first; `subject`: only of this job or worker."""
        parameters = {"subject": subject} if subject is not None else {}
        return self._pages("/v1/audit", parameters, limit)

    def ready(self) -> dict[str, str]:
        """Return what the server lacks: name of each failed check and a sentence; empty when it is ready."""
        try:
            reply = self._http.get("/readyz")
        except httpx.HTTPError as error:
            raise Unavailable(f"{self.url} does not answer: {error}") from error
        failed: dict[str, str] = _object(reply).get("failed", {})
        return failed

    def _pages(
        self, path: str, parameters: Mapping[str, Any], limit: int | None, *, cursor: str = "id"
    ) -> Iterator[Json]:
        wanted = dict(parameters)
        left = limit
        while left is None or left > 0:
            wanted["limit"] = PAGE if left is None else min(PAGE, left)
            page = self._call("GET", path, parameters=wanted)
            yield from page["data"]
            if not page["has_more"] or not page["data"]:
                return
            wanted["after"] = page["data"][-1][cursor]
            left = None if left is None else left - len(page["data"])

    def _stream(self, path: str, after: int, silence_s: float) -> Iterator[ServerSentEvent]:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        timeout = httpx.Timeout(silence_s, connect=5.0)
        with self._http.stream("GET", path, headers=headers, timeout=timeout) as reply:
            if reply.is_error:
                reply.read()
                raise _error(reply)
            yield from sse_events(lines(reply.iter_text()))

    def _call(
        self,
        method: str,
        path: str,
        *,
        parameters: Mapping[str, Any] | None = None,
        body: Json | None = None,
        headers: Mapping[str, str] | None = None,
        again: bool | None = None,
    ) -> Json:
        """Call and return the answer; with `again` (default: for GET) also after it may have been done once."""
        again = method == "GET" if again is None else again
        given = {name: value for name, value in (parameters or {}).items() if value is not None}
        end = time.monotonic() + self.retry_s
        pause = 0.1
        while True:
            failure: RlharvestError
            cause: Exception | None = None
            try:
                reply = self._http.request(method, path, params=given, json=body, headers=headers)
            except httpx.HTTPError as error:
                failure, cause = Unavailable(f"{self.url} does not answer: {error or type(error).__name__}"), error
                retriable = again or isinstance(error, _CONNECT)
            else:
                if not reply.is_error:
                    return _object(reply)
                failure = _error(reply)
                retriable = isinstance(failure, NotLeader) or (again and reply.status_code in (502, 503, 504))
            if not retriable or time.monotonic() + pause > end:
                raise failure from cause
            time.sleep(pause)
            pause = min(2 * pause, 1.0)


def _part(text: str) -> str:
    """Return an identifier as one segment of a path."""
    return quote(text, safe="")


def _object(reply: httpx.Response) -> Json:
    try:
        value = reply.json()
    except ValueError as error:
        raise _foreign(reply) from error
    if not isinstance(value, dict):
        raise _foreign(reply)
    return value


def _foreign(reply: httpx.Response) -> InfrastructureError:
    return Unavailable(f"{reply.url} answers {reply.status_code} without a JSON object: is it a rlharvest server?")


def _error(reply: httpx.Response) -> RlharvestError:
    """Return the error that a reply stands for, with the server's message."""
    try:
        detail = reply.json()["error"]
        code, message = str(detail["code"]), str(detail["message"])
    except (ValueError, KeyError, TypeError):
        return _foreign(reply)
    if code == "not_leader":
        return NotLeader(message)
    known: dict[int, type[RlharvestError]] = {404: NotFound, 409: Conflict, 429: InfrastructureError}
    if reply.status_code in known:
        return known[reply.status_code](message)
    return Unavailable(message) if reply.status_code >= 500 else DataError(message)
