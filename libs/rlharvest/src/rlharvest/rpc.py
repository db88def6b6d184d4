"""gRPC as rlharvest uses it: health and reflection on every server, deadlines on every call, one leader of many addresses.

Invariants: no call is without a deadline; a call that meets UNAVAILABLE or "not the leader" goes to the next address and
comes back to the first after a pause, until its total time is over; an application error is raised at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from rlharvest.access import Access, Verdict
from rlharvest.credentials import Caller, bearer
from rlharvest.errors import InvalidField, Unavailable
from rlharvest.rpc_faults import NOT_LEADER as NOT_LEADER
from rlharvest.rpc_faults import Faults, Unavailability, foresees_nothing

MAX_MESSAGE_BYTES = 64 << 20

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

Stub = TypeVar("Stub")
Reply = TypeVar("Reply")


class Server:
    """A grpc.aio server with health and reflection for the services added to it, which answers for every fault in them.

    Args:
        unavailable: names faults of libraries that may be over at the next try: the caller is told so.
        access: whom it takes.
        tls: certificate that it shows; None: it speaks plain text.
    """

    def __init__(
        self,
        unavailable: Unavailability = foresees_nothing,
        *,
        access: Access | None = None,
        tls: grpc.ServerCredentials | None = None,
    ) -> None:
        options = [*_OPTIONS, ("grpc.so_reuseport", 0)]
        self.grpc = grpc.aio.server(options=options, interceptors=[Faults(unavailable), Gate(access or Access())])
        self._tls = tls
        self.port = 0
        self._names: list[str] = []
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    def add(self, name: str, register: Callable[[Any, grpc.aio.Server], None], servicer: object) -> None:
        """Add a service; `name` is its full protobuf name, `register` the generated add_…_to_server."""
        register(servicer, self.grpc)
        self._names.append(name)

    async def start(self, address: str) -> None:
        """Listen on host:port; port 0 takes a free one, which `self.port` then names.

        Raises:
            InvalidField: the address cannot be listened on.
        """
        reflection.enable_server_reflection([*self._names, reflection.SERVICE_NAME], self.grpc)
        try:
            if self._tls is None:
                self.port = self.grpc.add_insecure_port(address)
            else:
                self.port = self.grpc.add_secure_port(address, self._tls)
        except RuntimeError as error:
            problem = "cannot be listened on: another process has it, or it is no address of this machine"
            fix = "Stop who uses it, or choose another."
            raise InvalidField("RLHARVEST_GRPC_ADDRESS", address, problem, fix) from error
        await self.grpc.start()
        await self.serving(True)

    async def serving(self, yes: bool) -> None:
        """Say through the health service whether this process can do work."""
        status = health_pb2.HealthCheckResponse.SERVING if yes else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ["", *self._names]:
            await self._health.set(name, status)

    async def close(self, grace_s: float = 1.0) -> None:
        await self.grpc.stop(grace_s)


class Gate(grpc.aio.ServerInterceptor):
    """Refuses who may not call, before the message is read; and who speaks for another worker, after."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler  # all methods of ours are unary; health and reflection are open
        name = str(handler_call_details.method)
        metadata = handler_call_details.invocation_metadata or ()
        given = bearer(next((str(value) for key, value in metadata if key == "authorization"), ""))
        refused = self._access.method(name, given)
        behaviour: Callable[..., Any] = handler.unary_unary

        async def refuse(_request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            assert refused is not None
            await _abort(context, refused)

        async def checked(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            if (verdict := self._access.speaks(name, given, getattr(request, "worker", ""))) is not None:
                await _abort(context, verdict)
            return await behaviour(request, context)

        if refused is not None:
            return grpc.unary_unary_rpc_method_handler(refuse, request_deserializer=bytes)
        return grpc.unary_unary_rpc_method_handler(
            checked, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )


async def _abort(context: grpc.aio.ServicerContext[Any, Any], verdict: Verdict) -> None:
    unknown = verdict.kind == "unknown"
    code = grpc.StatusCode.UNAUTHENTICATED if unknown else grpc.StatusCode.PERMISSION_DENIED
    await context.abort(code, verdict.message)


class Client:
    """Channels to one service at one or more addresses, of which one leads.

    Args:
        caller: how this process shows itself, and whether it encrypts; may be replaced while calls go on.
    """

    def __init__(self, addresses: str | Sequence[str], caller: Caller | None = None) -> None:
        self.caller = caller or Caller()
        names = addresses.split(",") if isinstance(addresses, str) else list(addresses)
        self.addresses = [name.strip() for name in names if name.strip()]
        tls = self.caller.tls.channel
        self._channels = [
            grpc.aio.insecure_channel(address, options=_OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(address, tls, options=_OPTIONS)
            for address in self.addresses
        ]
        self._current = 0

    async def call(
        self,
        stub: Callable[[grpc.aio.Channel], Stub],
        method: Callable[[Stub], Callable[..., Awaitable[Reply]]],
        request: object,
        *,
        timeout_s: float = 5.0,
        total_s: float = 60.0,
    ) -> Reply:
        """Call a unary method until it answers; raise Unavailable after `total_s` without an answer.

        Args:
            stub: the generated stub class.
            method: picks the method of the stub, e.g. `lambda stub: stub.Register`.
            timeout_s: deadline of each try.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + total_s
        tries = 0
        while True:
            channel = self._channels[self._current]
            try:
                metadata = tuple(self.caller.headers.items())
                return await method(stub(channel))(request, timeout=timeout_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                if not _try_elsewhere(error):
                    raise
                if loop.time() >= end:
                    where = ", ".join(self.addresses)
                    raise Unavailable(f"no leader answers at {where} after {total_s:g} s: {error.details()}") from error
            self._current = (self._current + 1) % len(self._channels)
            tries += 1
            if tries % len(self._channels) == 0:
                await asyncio.sleep(min(0.1 * 2 ** min(tries // len(self._channels), 4), 1.0))

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


def _try_elsewhere(error: grpc.aio.AioRpcError) -> bool:
    code = error.code()
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return True
    return code is grpc.StatusCode.FAILED_PRECONDITION and error.details() == NOT_LEADER
