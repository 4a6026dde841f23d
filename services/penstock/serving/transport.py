"""Seam between services and the transport of their calls: grpc.aio, or Penstock's own HTTP/2 (`penstock.http2`).

`make_transport` chooses, and no other code depends on the choice. Statuses and errors are grpc's on both: a call that
fails raises grpc.aio.AioRpcError; a write to a call that is over raises grpc.aio.InternalError on a server and
asyncio.InvalidStateError on a client; `abort` raises grpc.aio.AbortError.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from penstock.common.config import ChannelConfig, ServerConfig
from penstock.common.credentials import channel_tls_context, tls_context
from penstock.common.errors import PenstockError
from penstock.http2 import frames
from penstock.http2.channel import Http2Channel
from penstock.http2.limits import Limits, ServerLimits
from penstock.http2.metadata import MAX_METADATA_BYTES, Metadata
from penstock.http2.server import Http2Server
from penstock.http2.server_call import Refused
from penstock.serving.channels import decorator, open_channel
from penstock.serving.grpc_server import GrpcServer
from penstock.serving.interceptors import Admit, Wrap, refusal_trailers

ResponseT = TypeVar("ResponseT")
ResponseT_co = TypeVar("ResponseT_co", covariant=True)


class ServerCall(Protocol):
    """A call for its handler. It belongs to the event loop of the server."""

    @property
    def writes_at_once(self) -> bool:
        """True when `try_write` may succeed; False saves the attempt for each message."""

    @property
    def write(self) -> Callable[[Any], Awaitable[None]]:
        """Send a message; return when it is under way. Raises grpc.aio.InternalError when the call is over."""

    def try_write(self, message: Any) -> bool:
        """Send a message now, from a callback of the loop; False when `write` would wait, or raise.

        The caller may reuse the message after this returns. Always False before the first `write`.
        """

    @property
    def invocation_metadata(self) -> Callable[[], Metadata]:
        """Return the metadata that the client sent with the call."""

    @property
    def time_remaining(self) -> Callable[[], float | None]:
        """Return the seconds to the deadline; None without one."""

    @property
    def set_trailing_metadata(self) -> Callable[[Metadata], None]:
        """Set metadata to send with the status."""

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the call is over: at its status or reset, or, with grpc.aio, when its handler ends."""

    def code(self) -> grpc.StatusCode:
        """Return the status that the handler has set; OK when it has set none."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call with a status. Always raises grpc.aio.AbortError."""


class CheckedCall(ServerCall, Protocol):
    """A call of a service that checks its callers itself (serving.server.ChecksCallers)."""

    def vouch(self) -> None:
        """Note that the handler has found its credentials good: it is bounded as others are from now on."""


class StreamCall(Protocol[ResponseT_co]):
    """A bidirectional call for its client: one task calls `write`, another `run`."""

    @property
    def write(self) -> Callable[[Message], Awaitable[None]]:
        """Send a message. Raises asyncio.InvalidStateError, or grpc.aio.AioRpcError, when the call is over."""

    async def write_all(self, requests: Iterable[Message]) -> None:
        """Send several messages in order, together where the transport can. Raises as `write`."""

    async def run(self, take: Callable[[ResponseT_co], None]) -> None:
        """Hand every message to `take`, which must not wait, until the call ends with OK.

        It also returns on a message that cannot be parsed. Raises grpc.aio.AioRpcError, and the errors of `take`.
        """

    async def receive(self) -> ResponseT_co | None:
        """Return the next message, or None once the call has ended with OK. Used instead of `run` by a reader that
        waits.

        Raises grpc.aio.AioRpcError; a message that cannot be parsed also ends the call.
        """

    async def done_writing(self) -> None:
        """Signal that no message follows. Raises as `write`."""

    def cancel(self) -> object:
        """Cancel the call."""


class Channel(Protocol):
    """A channel to one address. It connects when first used, and again after a loss."""

    @property
    def for_stubs(self) -> grpc.aio.Channel:
        """Return the channel itself, for generated stubs: calls of one request, with one message or a stream back."""

    async def open_stream(
        self, method: str, parse: Callable[[bytes], ResponseT], *, joins: bool = False
    ) -> StreamCall[ResponseT]:
        """Call the bidirectional `method` ("/package.Service/Name"). Raises grpc.aio.AioRpcError.

        With `joins` the transport may join the bytes of waiting messages and hand them to `parse` as one: protobuf
        merges them. A transport that does not gives the stream a connection of its own, on which the writer notices a
        reader that is behind, and can join what waits.
        """


class Server(Protocol):
    """A server. Generated code adds handlers through the first two methods."""

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None: ...

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None: ...

    async def open_port(self) -> int:
        """Open the port and return it. Raises OSError, and StartupError naming the flag of a file."""

    async def start(self) -> None:
        """Accept connections."""

    async def stop(self, grace: float | None) -> None:
        """Take no new calls, give live ones `grace` seconds, cancel the rest, hang up."""


class Transport(ABC):
    """Makes servers and channels of one kind."""

    @abstractmethod
    def make_server(
        self, config: ServerConfig, *, max_calls: int, wrap: Wrap, shares_port: bool, admit: Admit | None = None
    ) -> Server:
        """Make a server that refuses more than `max_calls` at once.

        `wrap` is called once for each method, with its name and handler. It returns the handler to use: a coroutine
        that takes the request (or an async iterator of requests) and a ServerCall. `shares_port`: other processes
        also listen on the port.

        `admit` is called with the method's name and the metadata of each call, before its request is read. It returns
        True for a call admitted by its credentials, False for one that needs none, and raises PenstockError for any
        other. Without it every call is admitted.
        """

    @abstractmethod
    def open_channel(
        self, address: str, config: ChannelConfig, *, connect_timeout_seconds: float
    ) -> contextlib.AbstractAsyncContextManager[Channel]:
        """Open a channel to `address` (host:port) for the block; its calls of one request end with it.

        grpc.aio has its own time limit to connect, but for streams that join. Raises StartupError when a TLS or token
        file cannot be read.
        """


def make_transport(config: ServerConfig) -> Transport:
    """Make the configured transport, with which a process serves and calls other services."""
    return Http2Transport() if config.transport == "asyncio" else GrpcTransport()


class GrpcTransport(Transport):
    """Transport by grpc.aio."""

    def make_server(
        self, config: ServerConfig, *, max_calls: int, wrap: Wrap, shares_port: bool, admit: Admit | None = None
    ) -> Server:
        return GrpcServer(config, max_calls=max_calls, wrap=wrap, shares_port=shares_port, admit=admit)

    @contextlib.asynccontextmanager
    async def open_channel(
        self, address: str, config: ChannelConfig, *, connect_timeout_seconds: float
    ) -> AsyncIterator[Channel]:
        async with open_channel(address, config, connect_timeout_seconds=connect_timeout_seconds) as channel:
            yield channel


class Http2Transport(Transport):
    """Transport by Penstock's own HTTP/2."""

    def make_server(
        self, config: ServerConfig, *, max_calls: int, wrap: Wrap, shares_port: bool, admit: Admit | None = None
    ) -> Server:
        return _ConfiguredHttp2Server(config, max_calls=max_calls, wrap=wrap, shares_port=shares_port, admit=admit)

    @contextlib.asynccontextmanager
    async def open_channel(
        self, address: str, config: ChannelConfig, *, connect_timeout_seconds: float
    ) -> AsyncIterator[Channel]:
        channel = Http2Channel(
            address,
            config,
            timeout=connect_timeout_seconds,
            tls=channel_tls_context(config),
            server_name=config.channel_tls_server_name,
            decorate=decorator(config),
        )
        try:
            yield channel
        finally:
            channel.close()


class _ConfiguredHttp2Server(Http2Server):
    """Http2Server that takes its address from the configuration."""

    def __init__(
        self, config: ServerConfig, *, max_calls: int, wrap: Wrap, shares_port: bool, admit: Admit | None
    ) -> None:
        server_limits = ServerLimits(
            max_calls=max_calls,
            max_probes=config.anonymous_rpcs,
            request_bytes=max(config.request_buffer_bytes, _connection_bytes(config)),
            max_strangers=config.anonymous_connections,
            strangers_share=config.anonymous_cpu_share,
        )
        limits = http2_limits(config, max_streams=min(max_calls, config.connection_rpcs))
        super().__init__(limits, server_limits, wrap=wrap, admit=_refusing(admit) if admit is not None else None)
        self._config = config
        self._shares_port = shares_port

    async def open_port(self) -> int:
        tls = tls_context(self._config) if self._config.is_tls else None
        return await self.listen(self._config.host, self._config.port, tls, shares_port=self._shares_port)


def _refusing(admit: Admit) -> Admit:
    """Return `admit` with errors that the library understands."""

    def refuse(name: str, metadata: Metadata) -> bool:
        try:
            return admit(name, metadata)
        except PenstockError as error:
            raise Refused(error.code, error.message, refusal_trailers(error, metadata)) from None

    return refuse


def _connection_bytes(config: ServerConfig) -> int:
    return max(config.connection_window_bytes, config.receive_limit_bytes + frames.DEFAULT_WINDOW)


def http2_limits(config: ServerConfig, *, max_streams: int) -> Limits:
    """Make the configured limits of a connection; `max_streams` calls at once."""
    return Limits(
        max_message_bytes=config.receive_limit_bytes,
        max_header_list_bytes=MAX_METADATA_BYTES,
        max_streams=max_streams,
        keepalive_seconds=config.keepalive_seconds,
        keepalive_timeout_seconds=config.keepalive_timeout_seconds,
        min_ping_interval_seconds=config.min_ping_interval_seconds,
        stream_window_bytes=config.stream_window_bytes,
        connection_window_bytes=_connection_bytes(config),
        handshake_seconds=config.handshake_seconds,
        request_seconds=config.request_seconds,
        write_buffer_bytes=config.write_buffer_bytes,
        # A connection may cancel all of its live calls at once.
        idle_frames=max(config.idle_frames, max_streams),
        idle_frames_per_second=config.idle_frames_per_second,
        early_reset_seconds=config.early_reset_seconds,
        max_probes=config.anonymous_rpcs_each,
    )
