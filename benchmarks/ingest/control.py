"""How the processes of the ingest benchmark are told what to do: one JSON request, one JSON reply, over NATS."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


async def serve(nats: Client, name: str, answer: Answer) -> None:
    """Answer the requests to `name` until one asks to stop; a failure is the reply."""
    stopped = asyncio.Event()

    async def heard(message: Msg) -> None:
        request = json.loads(message.data)
        try:
            reply = await answer(request)
        except Exception as error:  # noqa: BLE001 - whoever asked reports it
            reply = {"error": repr(error)}
        await message.respond(json.dumps(reply).encode())
        if request.get("do") == "stop":
            stopped.set()

    await nats.subscribe(f"bench.{name}", cb=heard)
    await stopped.wait()
    await nats.flush()


async def ask(nats: Client, name: str, *, timeout_s: float = 300.0, **request: Any) -> dict[str, Any]:
    """Return the reply of a process; waits until it is there.

    Raises:
        RuntimeError: it failed; says how.
    """
    for _ in range(600):
        try:
            message = await nats.request(f"bench.{name}", json.dumps(request).encode(), timeout=timeout_s)
        except NoRespondersError:
            await asyncio.sleep(0.1)
            continue
        reply: dict[str, Any] = json.loads(message.data)
        if "error" in reply:
            raise RuntimeError(f"{name}: {reply['error']}")
        return reply
    raise RuntimeError(f"{name} did not come up")
