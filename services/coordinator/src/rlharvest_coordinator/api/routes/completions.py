"""/v1/completions, /v1/chat/completions, /v1/models: OpenAI's routes for sampling, over the workers of a running job.

A stream is `data: {chunk}` lines, then `data: [DONE]`; one that cannot go on ends with `data: {"error": ...}` instead. A
client that goes away ends what was sampled for it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter, Request
from rlharvest.errors import RlharvestError
from rlharvest.supervise import cancel
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rlharvest_coordinator.api import errors
from rlharvest_coordinator.api.context import ERRORS, Context, Parts
from rlharvest_coordinator.api.resources import ListOf, Resource, listed
from rlharvest_coordinator.api.strict import StrictJSON, text_of
from rlharvest_coordinator.gateway import request as requests
from rlharvest_coordinator.gateway.choice import Piece
from rlharvest_coordinator.gateway.completion import Completion
from rlharvest_coordinator.gateway.shapes import ChatShape, CompletionShape, Shape
from rlharvest_coordinator.run import Run

router = APIRouter(prefix="/v1", tags=["OpenAI"], responses=ERRORS)

KEEP_ALIVE_S = 10.0

_NOBODY = 499
"""Status of an answer whose client has gone."""

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "The answer, or a stream of it."}
}


class Model(Resource):
    """A running job, as OpenAI shows a model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rlharvest"
    name: str
    """Of the job; also taken as `model` of a request, if no other running job has it."""
    version: int | None
    """Newest version of the weights."""


@router.post("/completions", response_class=Response, responses=_STREAM)
async def create_completion(request: Request, ask: requests.CompletionAsk, parts: Parts) -> Response:
    """Sample a completion of a text, or of token ids."""
    run = await parts.gateway.job(ask.model)
    order = await asyncio.to_thread(requests.completion, ask, run.scope.prepared)
    shape = CompletionShape(**_arguments(parts, run, ask, order), logprobs=ask.logprobs is not None)
    return await _answer(request, parts, run, ask, order, shape)


@router.post("/chat/completions", response_class=Response, responses=_STREAM)
async def create_chat_completion(request: Request, ask: requests.ChatAsk, parts: Parts) -> Response:
    """Sample the next message of a conversation."""
    run = await parts.gateway.job(ask.model)
    usual = run.scope.spec.sampling.max_completion_length
    order = await asyncio.to_thread(requests.chat, ask, run.scope.prepared, usual=usual)
    shape = ChatShape(**_arguments(parts, run, ask, order), logprobs=ask.logprobs)
    return await _answer(request, parts, run, ask, order, shape)


@router.get("/models")
async def list_models(parts: Parts) -> ListOf[Model]:
    """List the jobs that serve."""
    return listed([_model(run) for run in parts.gateway.serving()], False)


@router.get("/models/{model}")
async def get_model(model: str, parts: Parts) -> Model:
    """Read a job that serves, by its id or name."""
    return _model(await parts.gateway.job(model))


def _model(run: Run) -> Model:
    row = run.scope.row
    return Model(id=run.id, created=int(row.created_at), name=run.scope.spec.name, version=row.version)


def _arguments(parts: Context, run: Run, ask: requests.Ask, order: requests.Order) -> dict[str, Any]:
    return {
        "id": secrets.token_hex(12),
        "created": int(parts.jobs.clock.time()),
        "model": ask.model,
        "prompts": order.prompts,
        "n": ask.n,
        "ids": ask.return_token_ids,
        "piece_text": run.scope.prepared.tokenizer.piece,
    }


async def _answer(
    request: Request, parts: Context, run: Run, ask: requests.Ask, order: requests.Order, shape: Shape
) -> Response:
    completion = parts.gateway.start(run, ask, order)
    if ask.stream:
        return Streamed(completion, shape, usage=ask.stream_options.include_usage)
    try:
        return await _whole(request, completion, shape)
    finally:
        completion.close()


async def _whole(request: Request, completion: Completion, shape: Shape) -> Response:
    gone = asyncio.ensure_future(_gone(request))
    reading = asyncio.ensure_future(_all(completion))
    try:
        await asyncio.wait({gone, reading}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            return Response(status_code=_NOBODY)
        return StrictJSON(shape.whole(reading.result(), completion.choices))
    finally:
        await cancel([gone, reading])


async def _all(completion: Completion) -> list[Piece]:
    return [piece async for piece in completion.pieces(KEEP_ALIVE_S) if piece is not None]


async def _gone(request: Request) -> None:
    """Wait until the client has gone: its body was read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Streamed(StreamingResponse):
    """A completion as server-sent events; it ends with its connection."""

    def __init__(self, completion: Completion, shape: Shape, *, usage: bool) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(_events(completion, shape, usage=usage), media_type="text/event-stream", headers=headers)
        self.completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.completion.close()


async def _events(completion: Completion, shape: Shape, *, usage: bool) -> AsyncIterator[str]:
    nothing = {"usage": None} if usage else {}
    try:
        async for piece in completion.pieces(KEEP_ALIVE_S):
            yield _event(shape.chunk(piece) | nothing) if piece is not None else ": still here\n\n"
    except RlharvestError as error:
        yield f"data: {bytes(errors.response(error).body).decode()}\n\n"
        return
    if usage:
        yield _event(shape.usage_chunk(completion.choices))
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {text_of(chunk)}\n\n"
