"""Channels to other services: TLS, bearer token, keepalive, request id and trace of the call being handled; health.

Channels here are grpc.aio's, for commands and tests; services use serving.transport.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.common.config import ChannelConfig
from penstock.common.credentials import TokenFile, channel_credentials
from penstock.common.proxies import proxy_options
from penstock.common.request_context import REQUEST_ID_KEY, current_request_id
from penstock.common.tracing import outgoing
from penstock.http2.client_connection import rpc_error
from penstock.http2.metadata import Metadata
from penstock.serving.grpc_options import Options, channel_options, joining_options

ResponseT = TypeVar("ResponseT")
# grpc's type stubs do not know it.
_END: object = cast("Any", grpc.aio).EOF
_LOCAL = ChannelConfig()
_CONNECT_SECONDS = 10.0


def open_channel(
    address: str, config: ChannelConfig = _LOCAL, *, connect_timeout_seconds: float = _CONNECT_SECONDS
) -> GrpcChannel:
    """Open a channel to `address` (host:port or a gRPC target). It connects when first used.

    `connect_timeout_seconds`: for the connection of a stream that has its own; gRPC has a limit for all others.
    Raises StartupError when a TLS or token file cannot be read.
    """
    credentials = channel_credentials(config)

    def connection(of_transport: Options) -> grpc.aio.Channel:
        options = [*of_transport, *proxy_options(address)]
        if config.channel_tls_server_name is not None:
            options.append(("grpc.ssl_target_name_override", config.channel_tls_server_name))
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, credentials, options=options)

    return GrpcChannel(
        connection(channel_options(config)),
        lambda: connection(joining_options(config)),
        decorator(config),
        connect_timeout_seconds,
    )


def decorator(config: ChannelConfig) -> Callable[[Metadata], Metadata]:
    """Make a function that adds request id, trace context and bearer token to metadata.

    Raises StartupError for a file that cannot be read.
    """
    path = config.channel_token_file
    tokens = TokenFile(path, "--channel-token-file") if path else None

    def decorate(metadata: Metadata) -> Metadata:
        added: list[tuple[str, str | bytes]] = list(metadata)
        request_id = current_request_id.get()
        if request_id is not None and all(key != REQUEST_ID_KEY for key, _ in added):
            added.append((REQUEST_ID_KEY, request_id))
        added += outgoing()
        if tokens is not None:
            added.append(("authorization", tokens.authorization()))
        return tuple(added)

    return decorate


async def watch_health(channel: grpc.aio.Channel, service: str) -> AsyncGenerator[bool, None]:
    """Yield True when it serves, else False, now and at every change. Close it if it is not read to its end."""
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
    try:
        async for update in call:
            yield update.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        call.cancel()


async def until_serving(
    channel: grpc.aio.Channel, service: str, on_starting: Callable[[], object] = lambda: None
) -> bool:
    """Return True once it serves; False when its health ends. `on_starting` is called when it does not serve yet."""
    async with contextlib.aclosing(watch_health(channel, service)) as updates:
        async for is_serving in updates:
            if is_serving:
                return True
            on_starting()
    return False


class GrpcStreamCall(Generic[ResponseT]):
    """Call of grpc.aio behind the seam's StreamCall."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.write: Callable[[Message], Awaitable[None]] = call.write

    async def write_all(self, requests: Iterable[Message]) -> None:
        """Send the messages one by one."""
        for request in requests:
            await self.write(request)

    async def run(self, take: Callable[[ResponseT], None]) -> None:
        """Hand every message to `take`. Each wakes a task."""
        read = self._call.read
        while True:
            try:
                message = await read()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # The call was cancelled, not the task that runs it.
                raise rpc_error(grpc.StatusCode.CANCELLED, "cancelled here") from None
            # None: grpc could not parse it, and logged that.
            if message is _END or message is None:
                return
            take(message)

    async def receive(self) -> ResponseT | None:
        """Return the next message, or None at the end."""
        try:
            message = await self._call.read()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise rpc_error(grpc.StatusCode.CANCELLED, "cancelled here") from None
        return None if message is _END else cast("ResponseT | None", message)

    async def done_writing(self) -> None:
        """Signal that no message follows."""
        try:
            await self._call.done_writing()
        except grpc.aio.InternalError:
            # The call has ended meanwhile.
            raise asyncio.InvalidStateError("the call is over") from None

    def cancel(self) -> object:
        """Cancel the call."""
        return self._call.cancel()


class GrpcChannel(grpc.aio.Channel):
    """Channel that adds metadata to every call; an interceptor would put a task and a queue before every stream."""

    def __init__(
        self,
        inner: grpc.aio.Channel,
        open_joining: Callable[[], grpc.aio.Channel],
        decorate: Callable[[Metadata], Metadata],
        connect_timeout_seconds: float,
    ) -> None:
        """Make it over `inner`.

        `open_joining` opens the channel of a stream with a writer that joins messages that wait; it has
        `connect_timeout_seconds` to connect.
        """
        self._inner = inner
        self._open_joining = open_joining
        self._connect_timeout = connect_timeout_seconds
        # That channel, once it was needed.
        self._joining: grpc.aio.Channel | None = None
        self._decorate = decorate

    @property
    def for_stubs(self) -> grpc.aio.Channel:
        """Return the channel itself."""
        return self

    async def open_stream(
        self, method: str, parse: Callable[[bytes], ResponseT], *, joins: bool = False
    ) -> GrpcStreamCall[ResponseT]:
        """Call the bidirectional `method` ("/package.Service/Name").

        Here messages are never joined. With `joins` the stream has a connection of its own with a narrow window, so
        that its writer knows what was not read yet and can join it. Raises grpc.aio.AioRpcError (UNAVAILABLE) when that
        cannot be made in time.
        """
        channel = await self._connected_joining() if joins else self._inner
        start = channel.stream_stream(method, request_serializer=_serialized, response_deserializer=parse)
        return GrpcStreamCall(self._with_metadata(start)())

    async def _connected_joining(self) -> grpc.aio.Channel:
        channel = self._joining = self._joining or self._open_joining()
        try:
            async with asyncio.timeout(self._connect_timeout):
                await channel.channel_ready()
        except TimeoutError:
            why = f"no connection within {self._connect_timeout:g} s"
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, why) from None
        return channel

    def _with_metadata(self, start: Callable[..., Any]) -> Any:
        def call(*requests: Any, metadata: Any = None, **options: Any) -> Any:
            return start(*requests, metadata=self._decorate(metadata or ()), **options)

        return call

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(cast("Any", self._inner.unary_unary(*args, **kwargs)))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(cast("Any", self._inner.unary_stream(*args, **kwargs)))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(cast("Any", self._inner.stream_unary(*args, **kwargs)))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(cast("Any", self._inner.stream_stream(*args, **kwargs)))

    async def __aenter__(self) -> GrpcChannel:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        # One after the other and in this task: a call on a closed channel must not begin in between.
        try:
            if self._joining is not None:
                await self._joining.close(grace)
        finally:
            await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()
