"""Channel of a client to one address: it opens connections of client_calls and client_stream, and stubs use it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic, NoReturn, Self, TypeVar, cast

import grpc
from aiohappyeyeballs import start_connection
from google.protobuf.message import DecodeError

from penstock.http2 import frames
from penstock.http2.client_calls import AnswerStream, CallsConnection, late
from penstock.http2.client_connection import rpc_error
from penstock.http2.client_stream import ClientStreamCall, ResponseT
from penstock.http2.limits import ChannelLimits
from penstock.http2.metadata import Metadata

ProtocolT = TypeVar("ProtocolT", bound=asyncio.Protocol)
AnswerT = TypeVar("AnswerT")
# A function that a channel applies to a call's metadata before sending.
Decorate = Callable[[Metadata], Metadata]

# Seconds before a name's next address is tried in parallel with a silent one (RFC 8305, section 5).
_NEXT_ADDRESS_SECONDS = 0.25


class Peer:
    """An address and the facts for calls to it."""

    def __init__(self, address: str, tls: ssl.SSLContext | None = None, server_name: str | None = None) -> None:
        """Make it. `address`: host:port. `server_name`: the name in the certificate, if it is not the host."""
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._tls = tls
        self._name = server_name or self._host if tls is not None else None
        self._authority = address if self._name in (None, self._host) else str(self._name)
        self._heads: dict[str, bytes] = {}

    def head(self, method: str, metadata: Metadata) -> bytes:
        """Return the header block of a call of `method`; everything but the metadata is made once."""
        head = self._heads.get(method)
        if head is None:
            head = self._heads[method] = frames.request_headers(
                (
                    (":method", "POST"),
                    (":scheme", "http" if self._tls is None else "https"),
                    (":path", method),
                    (":authority", self._authority),
                    ("te", "trailers"),
                    ("content-type", "application/grpc"),
                    ("user-agent", "penstock"),
                )
            )
        return head + frames.request_headers(metadata)

    async def connect(self, make: Callable[[], ProtocolT], timeout: float | None) -> ProtocolT:
        """Open a connection. Raises grpc.aio.AioRpcError (UNAVAILABLE) without an answer within `timeout` seconds."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                end = await start_connection(found, happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS, interleave=1)
                # It owns the socket: closed here, too, its number would be another connection's by the time that the
                # loop lets go of it.
                _, protocol = await loop.create_connection(make, sock=end, ssl=self._tls, server_hostname=self._name)
        except (OSError, TimeoutError) as error:
            # A TimeoutError of asyncio has no text.
            reason = str(error) or f"no answer within {timeout:g} s"
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, f"no connection: {reason}") from error
        return protocol


class Answers(Generic[AnswerT]):
    """Messages of an answer, for one task; the call begins when the first is requested."""

    def __init__(
        self,
        begin_now: Callable[[], AnswerStream | None],
        begin: Callable[[], Awaitable[AnswerStream]],
        parse: Callable[[bytes], AnswerT],
        deadline: float | None,
    ) -> None:
        """Make it. `begin_now` begins the call unless it would have to wait. `deadline` is a time of the event loop."""
        self._begin_now, self._begin = begin_now, begin
        self._parse = parse
        self._deadline = deadline
        self._stream: AnswerStream | None = None
        self._waiting: deque[AnswerT] = deque()
        self._is_cancelled = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AnswerT:
        """Return the next message. Raises grpc.aio.AioRpcError for any status but OK."""
        if not self._waiting:
            self._waiting.extend(await self.read_all())
            if not self._waiting:
                raise StopAsyncIteration
        return self._waiting.popleft()

    async def read_all(self) -> list[AnswerT]:
        """Return the waiting messages, at least one; none after OK. Used instead of iteration, and raises as it does.

        Cancelling it cancels the call.
        """
        stream = self._stream if self._stream is not None else await self._open()
        while (messages := stream.waiting()) is None:
            try:
                await stream.more()
            except asyncio.CancelledError:
                stream.cancel()
                raise
        return list(map(self._parsed, messages))

    async def run(self, take: Callable[[list[AnswerT]], bool]) -> bool:
        """Hand the waiting messages to `take` in the turn of the event loop in which they arrive: no task is woken.

        Used instead of iteration. Returns True after OK, and False after `take` returned it: it may be run again.
        Raises as iteration does, and the errors of `take`. Cancelling it cancels the call.
        """
        stream = self._stream if self._stream is not None else await self._open()
        return await stream.run(lambda messages: take(list(map(self._parsed, messages))))

    def _parsed(self, message: bytes) -> AnswerT:
        try:
            return self._parse(message)
        except DecodeError:
            self.cancel()
            raise _unreadable() from None

    def cancel(self) -> None:
        """Cancel the call; its reader gets CANCELLED."""
        self._is_cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    async def _open(self) -> AnswerStream:
        stream = self._begin_now()
        if stream is None:
            try:
                async with asyncio.timeout_at(self._deadline):
                    stream = await self._begin()
            except TimeoutError:
                raise late() from None
        self._stream = stream
        if self._is_cancelled:
            stream.cancel()
        return stream


class Http2Channel:
    """Part of a grpc.aio.Channel that stubs use for calls with one request; `open_stream` is for the others.

    It connects when first used, and again after a loss. Belongs to one event loop.
    """

    def __init__(
        self,
        address: str,
        limits: ChannelLimits,
        *,
        timeout: float,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
        decorate: Decorate | None = None,
        stream_window: int = frames.STREAM_WINDOW,
    ) -> None:
        """Make it. `address`: host:port. A call waits `timeout` seconds for a connection, or until its own deadline.

        `tls` and `server_name` as in Peer. `decorate` makes the metadata of every call. `stream_window`: bytes of each
        answer that may be here or in flight before they are taken.
        """
        self._limits = limits
        self._timeout = timeout
        self._stream_window = stream_window
        self._peer = Peer(address, tls, server_name)
        self._decorate = decorate if decorate is not None else tuple
        self._connection: CallsConnection | None = None
        self._is_closed = False
        self._dialing: asyncio.Task[CallsConnection] | None = None

    @property
    def for_stubs(self) -> grpc.aio.Channel:
        """Return the channel itself, with the type that generated stubs take."""
        return cast("grpc.aio.Channel", self)

    async def open_stream(
        self, method: str, parse: Callable[[bytes], ResponseT], *, joins: bool = False
    ) -> ClientStreamCall[ResponseT]:
        """Call the bidirectional `method` ("/package.Service/Name") on its own connection.

        `parse` and `joins` as in ClientStreamCall. The stream outlives this channel. Raises grpc.aio.AioRpcError
        (UNAVAILABLE) without an answer in time.
        """
        limits, head = self._limits, self._peer.head(method, self._decorate(()))
        return await self._peer.connect(
            lambda: ClientStreamCall[ResponseT](head, parse, limits, joins=joins), self._timeout
        )

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: Any,
    ) -> Callable[..., Any]:

        async def call(request: Any, *, timeout: float | None = None, metadata: Metadata = ()) -> Any:
            data = request_serializer(request)
            if timeout is None:
                answer = await self._call(method, data, self._decorate(metadata))
            else:
                answer = await self._call_within(timeout, method, data, metadata)
            try:
                return response_deserializer(answer)
            except DecodeError:
                raise _unreadable() from None

        return call

    def unary_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: Any,
    ) -> Callable[..., Answers[Any]]:

        def call(request: Any, *, timeout: float | None = None, metadata: Metadata = ()) -> Answers[Any]:
            data, added = request_serializer(request), self._decorate(metadata)
            deadline = None
            if timeout is not None:
                deadline = asyncio.get_running_loop().time() + timeout
                added = (("grpc-timeout", frames.timeout(max(0.0, timeout))), *added)

            def begin_now() -> AnswerStream | None:
                connection = self._connection
                if connection is None or not connection.has_room:
                    return None
                return connection.begin(self._peer.head(method, added), data, deadline)

            async def begin() -> AnswerStream:
                connection = await self._connected()
                return await connection.stream(self._peer.head(method, added), data, deadline)

            return Answers(begin_now, begin, response_deserializer, deadline)

        return call

    def stream_unary(self, method: str, *_: Any, **__: Any) -> Callable[..., NoReturn]:
        """Not for this channel, but stubs ask for it."""
        return self.stream_stream(method)

    def stream_stream(self, method: str, *_: Any, **__: Any) -> Callable[..., NoReturn]:
        """Not for this channel, but stubs ask for it."""

        def call(*_: Any, **__: Any) -> NoReturn:
            raise TypeError(f"{method} is a stream of requests: open_stream")

        return call

    def close(self) -> None:
        """End all calls with UNAVAILABLE, later ones too, and hang up."""
        self._is_closed = True
        if self._dialing is not None:
            self._dialing.cancel()
        if self._connection is not None:
            self._connection.close()

    async def _call_within(self, timeout: float, method: str, data: bytes, metadata: Metadata) -> bytes:
        if timeout <= 0:
            raise late()
        added = (("grpc-timeout", frames.timeout(timeout)), *self._decorate(metadata))
        try:
            async with asyncio.timeout(timeout):
                return await self._call(method, data, added)
        except TimeoutError:
            raise late() from None

    async def _call(self, method: str, data: bytes, metadata: Metadata) -> bytes:
        connection = await self._connected()
        return await connection.call(self._peer.head(method, metadata), data)

    async def _connected(self) -> CallsConnection:
        connection = self._connection
        if connection is None or not connection.is_usable:
            return await self._connect()
        return connection

    async def _connect(self) -> CallsConnection:
        """Connect once for all waiting calls; the attempt continues when one of them gives up."""
        if self._is_closed:
            raise _closed()
        if self._dialing is None or self._dialing.done():
            self._dialing = asyncio.ensure_future(self._dial())
        dialing = self._dialing
        try:
            return await asyncio.shield(dialing)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not dialing.cancelled() or task is None or task.cancelling():
                raise
            # The attempt was cancelled, not its caller.
            raise _closed() from None

    async def _dial(self) -> CallsConnection:
        old, limits, window = self._connection, self._limits, self._stream_window
        make = partial(CallsConnection, limits, stream_window=window)
        self._connection = await self._peer.connect(make, self._timeout)
        if old is not None:
            old.drain()
        return self._connection


def _closed() -> grpc.aio.AioRpcError:
    return rpc_error(grpc.StatusCode.UNAVAILABLE, "the channel is closed")


def _unreadable() -> grpc.aio.AioRpcError:
    return rpc_error(grpc.StatusCode.INTERNAL, "Exception deserializing response!")
