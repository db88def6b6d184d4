"""What a gRPC server answers when a call goes wrong: always a status that tells the caller what to do, never UNKNOWN.

Invariants: bytes that are no message of the method are INVALID_ARGUMENT and never reach the servicer; an error of ours that
a servicer lets through has the status of its kind; what is not foreseen is logged in full and answered with INTERNAL and
nothing of its text; an answer that nobody waits for any more is no fault (grpc.aio.BaseError, which gRPC itself drops);
details fit into a trailer, whatever a message of an error quotes; a full disk is named in the trailing metadata, for gRPC
uses its code itself for messages that are too large.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from rlharvest.errors import (
    Conflict,
    DataError,
    DiskFull,
    Fenced,
    InfrastructureError,
    LimitReached,
    NotFound,
    NotLeader,
    RlharvestError,
)

log = structlog.get_logger(__name__)

NOT_LEADER = "not the leader"
"""Details of the FAILED_PRECONDITION with which a coordinator that does not lead answers."""

MAX_DETAILS = 2000
"""Bytes of an answer's details. Clients refuse trailers of more than 8 KiB, in which a byte may take three."""

ERROR_KEY = "rlharvest-error"
DISK_FULL = "disk_full"
"""Trailing metadata of an answer that stands for DiskFull."""

Details = tuple[grpc.StatusCode, str]
Unavailability = Callable[[Exception], str | None]
"""Returns what the caller is told of an error that may be over at the next try, None of any other."""
Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]]


def foresees_nothing(_error: Exception) -> None:
    """Say of no error that it may be over at the next try."""
    return None


def status(error: Exception, unavailable: Unavailability = foresees_nothing) -> Details:
    """Return the status that an error stands for."""
    match error:
        case NotLeader() | Fenced():
            return grpc.StatusCode.FAILED_PRECONDITION, NOT_LEADER
        case DataError():
            return grpc.StatusCode.INVALID_ARGUMENT, shortened(str(error))
        case NotFound():
            return grpc.StatusCode.NOT_FOUND, shortened(str(error))
        case Conflict():
            return grpc.StatusCode.ABORTED, shortened(str(error))
        case DiskFull() | LimitReached():
            return grpc.StatusCode.RESOURCE_EXHAUSTED, shortened(str(error))
        case InfrastructureError():
            return grpc.StatusCode.UNAVAILABLE, shortened(str(error))
        case NotImplementedError():
            return grpc.StatusCode.UNIMPLEMENTED, "this server does not have the method"
        case RlharvestError():
            return grpc.StatusCode.INTERNAL, shortened(str(error))
    if (problem := unavailable(error)) is not None:
        return grpc.StatusCode.UNAVAILABLE, problem
    return grpc.StatusCode.INTERNAL, "the server failed; its log says more"


def shortened(text: str) -> str:
    """Return details that every client can read: of bounded length, without half surrogates."""
    data = text.encode("utf-8", "replace")
    return data.decode() if len(data) <= MAX_DETAILS else data[: MAX_DETAILS - 3].decode("utf-8", "ignore") + "…"


class Faults(grpc.aio.ServerInterceptor):
    """Reads the bytes of each request itself, and answers for whatever is raised behind it.

    Args:
        unavailable: names faults of libraries that may be over at the next try, e.g. of the database.
    """

    def __init__(self, unavailable: Unavailability = foresees_nothing) -> None:
        self._unavailable = unavailable

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler  # there is no such method: gRPC itself says so
        method = str(handler_call_details.method)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(method, handler, handler.unary_unary), response_serializer=handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._unary(method, handler, handler.unary_stream), response_serializer=handler.response_serializer
            )
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                self._stream(method, handler, handler.stream_stream), response_serializer=handler.response_serializer
            )
        return handler

    def _unary(
        self, method: str, handler: grpc.RpcMethodHandler[Any, Any], behaviour: Callable[..., Any]
    ) -> Callable[[bytes, Context], Awaitable[Any]]:
        async def answer(data: bytes, context: Context) -> Any:
            request = await self._read(method, handler, data, context)
            try:
                return await behaviour(request, context)
            except grpc.aio.BaseError:
                raise
            except Exception as error:  # noqa: BLE001 - the last one who can answer the caller
                await self._refuse(method, error, context)

        return answer

    def _stream(
        self, method: str, handler: grpc.RpcMethodHandler[Any, Any], behaviour: Callable[..., Any]
    ) -> Callable[[AsyncIterator[bytes], Context], AsyncIterator[Any]]:
        async def answers(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            async def read() -> AsyncIterator[Any]:
                async for data in requests:
                    yield await self._read(method, handler, data, context)

            try:
                async for answer in behaviour(read(), context):
                    yield answer
            except grpc.aio.BaseError:
                raise
            except Exception as error:  # noqa: BLE001 - the last one who can answer the caller
                await self._refuse(method, error, context)

        return answers

    async def _read(self, method: str, handler: grpc.RpcMethodHandler[Any, Any], data: bytes, context: Context) -> Any:
        if handler.request_deserializer is None:
            return data
        try:
            return handler.request_deserializer(data)
        except (DecodeError, UnicodeDecodeError, ValueError) as error:
            problem = f"{len(data)} bytes are no request of {method}: {error}. Send the message of its .proto file."
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, shortened(problem))

    async def _refuse(self, method: str, error: Exception, context: Context) -> None:
        code, details = status(error, self._unavailable)
        if code is grpc.StatusCode.INTERNAL:
            log.error("rpc.failed", method=method, exc_info=error)
        elif code is grpc.StatusCode.UNAVAILABLE:
            log.warning("rpc.unavailable", method=method, error=repr(error))
        named = ((ERROR_KEY, DISK_FULL),) if isinstance(error, DiskFull) else ()
        await context.abort(code, details, named)
