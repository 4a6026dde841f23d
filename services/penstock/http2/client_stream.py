"""Bidirectional stream of gRPC on its own HTTP/2 connection, on asyncio.

It is for long-lived streams of many small messages: grpc.aio pays system calls and thread switches for each message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message

from penstock.http2 import frames
from penstock.http2.client_connection import ClientConnection, rpc_error, wake
from penstock.http2.limits import ChannelLimits
from penstock.http2.one_write import flushed_together

ResponseT = TypeVar("ResponseT")
END: object = cast("Any", grpc.aio).EOF
_STREAM = 1
# Bytes of both windows that may be owed to the peer: the connection's is as large as the stream's.
_OWED = frames.STREAM_WINDOW // 4
# Bytes of messages that are parsed as one, and taken in one turn of the event loop: this limits its length.
_JOINED_BYTES = 64 << 10


class ClientStreamCall(ClientConnection, Generic[ResponseT]):
    """Part of a grpc.aio.StreamStreamCall. Belongs to one event loop; one task reads and one writes."""

    def __init__(
        self, head: bytes, parse: Callable[[bytes], ResponseT], limits: ChannelLimits, *, joins: bool = False
    ) -> None:
        """Make it. `head`: the header block of the request.

        `joins`: waiting messages are parsed as one. protobuf merges a message with the bytes of another after it.
        """
        super().__init__(limits)
        self._head = head
        self._parse = parse
        self._joins = joins
        self._body = bytearray()
        self._messages: deque[bytes] = deque()
        self._waiting_bytes = 0
        # Bytes of both windows, the stream's and the connection's, not yet given back to the peer.
        self._owed = 0
        self._window = frames.DEFAULT_WINDOW
        # Set once the call is over: AioRpcError has the status, OK included.
        self._status: grpc.aio.AioRpcError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._has_waited = True
        # While `run` runs: the receiver of messages, a flag that a later turn continues with them, and the error.
        self._on_message: Callable[[ResponseT], None] | None = None
        self._goes_on = False
        self._failure: Exception | None = None

    # Methods for callers.

    async def read(self) -> object:
        """Return the next message (None: it could not be parsed), END after OK. Raises grpc.aio.AioRpcError."""
        if not self._has_waited:
            # Messages that come faster than they are taken must not hold up the rest of the loop.
            await asyncio.sleep(0)
        self._has_waited = False
        while not self._messages:
            if self._status is not None:
                return self._end()
            self._reader = self._loop.create_future()
            await self._reader
            self._has_waited = True
        try:
            return self._parse(self._next())
        except DecodeError:
            return None

    async def receive(self) -> ResponseT | None:
        """Return the next message; None: the call ended with OK, or the message could not be parsed. Raises
        grpc.aio.AioRpcError."""
        message = await self.read()
        return None if message is END else cast("ResponseT | None", message)

    async def run(self, take: Callable[[ResponseT], None]) -> None:
        """Hand every message to `take` in the turn of the event loop in which it arrives, until OK.

        It replaces `read`: a message wakes no task. It also returns when a message cannot be parsed. Raises
        grpc.aio.AioRpcError, and the errors of `take`.
        """
        self._on_message = take
        try:
            self._deliver()
            while self._on_message is not None and (self._status is None or self._messages):
                self._reader = self._loop.create_future()
                await self._reader
        finally:
            has_ended, self._on_message = self._on_message is not None, None
        if self._failure is not None:
            raise self._failure
        if has_ended:
            self._end()

    async def write(self, request: Message) -> None:
        """Send a message; return when it is under way. Raises asyncio.InvalidStateError when the call is over.

        Cancelling it during a message cancels the call: nothing could follow half of a message.
        """
        await self.write_all((request,))

    async def write_all(self, requests: Iterable[Message]) -> None:
        """Send several messages, together as far as there is room."""
        out: list[bytes] = []
        for request in requests:
            data = request.SerializeToString()
            size = len(data) + frames.MESSAGE_HEAD
            if size <= frames.DEFAULT_FRAME_SIZE and self._room() >= size:
                self._spend(size)
                out.append(frames.message_frame(_STREAM, data))
                continue
            self._send(b"".join(out))
            out.clear()
            await self._write_in_parts(bytes((0,)) + len(data).to_bytes(4, "big") + data)
        self._send(b"".join(out))

    async def done_writing(self) -> None:
        """Tell the peer that no message follows. Raises asyncio.InvalidStateError when the call is over."""
        self._room()
        self._send(frames.frame(frames.DATA, frames.END_STREAM, _STREAM, b""))

    def cancel(self) -> None:
        """Cancel the call, and close its connection."""
        if self._status is None:
            self._send(frames.reset(_STREAM, frames.CANCEL))
            self._end_all(rpc_error(grpc.StatusCode.CANCELLED, "cancelled here"))

    # Methods of ClientConnection.

    def _greeting(self) -> bytes:
        return frames.header_frames(_STREAM, self._head, end=False, limit=frames.DEFAULT_FRAME_SIZE)

    def _take_data(self, stream: int, flags: int, payload: bytes) -> None:
        if stream != _STREAM:
            return
        self._owed += len(payload)
        if self._owed > frames.STREAM_WINDOW:
            raise frames.Violation(frames.FLOW_CONTROL_ERROR, "more than the window")
        body = self._body
        body += frames.content(flags, payload, prioritised=False)
        at = 0
        while at + frames.MESSAGE_HEAD <= len(body):
            length = int.from_bytes(body[at + 1 : at + frames.MESSAGE_HEAD], "big")
            if length > self._max_message_bytes:
                what = f"Received message larger than max ({length} vs. {self._max_message_bytes})"
                self._fail(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
                return
            if body[at]:
                raise frames.Violation(frames.PROTOCOL_ERROR, "a message is compressed, which was not asked for")
            begin = at + frames.MESSAGE_HEAD
            if begin + length > len(body):
                break
            self._messages.append(bytes(body[begin : begin + length]))
            self._waiting_bytes += length
            at = begin + length
        if at:
            del body[:at]
        self._give_back()
        if flags & frames.END_STREAM:
            raise frames.Violation(frames.PROTOCOL_ERROR, "a call ended without a status")

    def _take_status(self, stream: int, error: grpc.aio.AioRpcError) -> None:
        if stream == _STREAM:
            self._end_all(error)

    def _take_room(self, stream: int, more: int) -> None:
        if stream == _STREAM:
            self._window += more
            if self._window > frames.MAX_WINDOW:
                raise frames.Violation(frames.FLOW_CONTROL_ERROR, "the window is wrong")
        wake(self._writer)

    def _resize_windows(self, change: int) -> None:
        self._window += change

    def _take_goaway(self, last_stream: int) -> None:
        # A later GOAWAY does not affect this stream: it ends on its own or with the connection.
        if last_stream < _STREAM:
            self._fail(grpc.StatusCode.UNAVAILABLE, "the peer takes no calls")

    def _taken(self) -> None:
        if self._on_message is None:
            if self._messages:
                wake(self._reader)
        elif not self._goes_on:
            self._deliver()

    def _end_all(self, error: grpc.aio.AioRpcError) -> None:
        """End the call, once; messages that came before can still be read."""
        if self._status is not None:
            return
        self._status = error
        self._hang_up()
        wake(self._reader)
        wake(self._writer)

    # Reading.

    def _end(self) -> object:
        """Return END after OK. Raises any other status."""
        if self._status is not None and self._status.code() is not grpc.StatusCode.OK:
            raise self._status
        return END

    def _deliver(self) -> None:
        """Hand on messages that have arrived; what their receiver writes to others' connections leaves at once."""
        flushed_together(self._hand_on)

    def _hand_on(self) -> None:
        """Hand on messages, a limited number of bytes in one turn of the event loop."""
        self._goes_on = False
        done = 0
        while self._messages and self._on_message is not None:
            if done >= _JOINED_BYTES:
                self._goes_on = True
                self._loop.call_soon(self._deliver)
                return
            data = self._next()
            done += len(data)
            try:
                self._on_message(self._parse(data))
            except DecodeError:
                self._on_message = None
            except Exception as error:
                # `run` raises it, as a task would have.
                self._on_message, self._failure = None, error
        if self._on_message is None or self._status is not None:
            wake(self._reader)

    def _next(self) -> bytes:
        messages = self._messages
        data = messages.popleft()
        if self._joins and messages:
            parts = [data]
            size = len(data)
            while messages and size < _JOINED_BYTES:
                parts.append(messages.popleft())
                size += len(parts[-1])
            data = b"".join(parts)
        self._waiting_bytes -= len(data)
        self._give_back()
        return data

    def _give_back(self) -> None:
        """Let the peer send more, unless the reader is behind; one frame serves many messages."""
        if self._waiting_bytes > frames.STREAM_WINDOW // 2 or self._owed < _OWED or self._status is not None:
            return
        self._send(frames.window_update(0, self._owed) + frames.window_update(_STREAM, self._owed))
        self._owed = 0

    async def _write_in_parts(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            room = min(self._room(), frames.DEFAULT_FRAME_SIZE, len(data) - at)
            if room <= 0:
                self._writer = self._loop.create_future()
                try:
                    await self._writer
                except asyncio.CancelledError:
                    if at:
                        self.cancel()
                    raise
                continue
            self._spend(room)
            self._send(frames.frame(frames.DATA, 0, _STREAM, data[at : at + room]))
            at += room

    def _room(self) -> int:
        if self._status is not None:
            raise asyncio.InvalidStateError(self._status.details())
        return 0 if self._is_paused else min(self._window, self._connection_window)

    def _spend(self, size: int) -> None:
        self._window -= size
        self._connection_window -= size
