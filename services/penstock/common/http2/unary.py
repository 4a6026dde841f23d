"""Unary calls of gRPC, many at a time on one HTTP/2 connection, on asyncio.

grpc.aio takes a thread switch or two and several system calls for each, before and after the server does anything.
"""

from __future__ import annotations

import asyncio
from collections import deque

import grpc

from penstock.common.config import ChannelConfig
from penstock.common.http2 import frames
from penstock.common.http2.client_connection import ClientConnection, rpc_error, wake

# Of what may be received, the connection's and each stream's: owed to the peer before it is given back.
_OWED = frames.STREAM_WINDOW // 4
_MAX_STREAM = frames.MAX_WINDOW - 2
# What a server lets a client have open at once before it says so.
_MAX_CALLS = 100


class _Call:
    """One call; the answer is the future's result."""

    __slots__ = ("answer", "body", "owed", "unsent", "window")

    def __init__(self, answer: asyncio.Future[bytes], window: int) -> None:
        self.answer = answer
        self.body = bytearray()
        # Of the stream's window: not given back to the peer yet.
        self.owed = 0
        # What the peer lets us send on the stream, and what waits for that.
        self.window = window
        self.unsent = b""


class UnaryConnection(ClientConnection):
    """Used on one event loop."""

    def __init__(self, config: ChannelConfig) -> None:
        super().__init__(config)
        self._calls: dict[int, _Call] = {}
        self._next_stream = 1
        self._max_calls = _MAX_CALLS
        # Callers beyond that wait for their turn.
        self._turns: deque[asyncio.Future[None]] = deque()
        self._owed = 0
        self._out: list[bytes] = []
        # The peer takes no new calls; those it has go on.
        self._is_leaving = False
        self._error = rpc_error(grpc.StatusCode.UNAVAILABLE, "the connection is closed")

    @property
    def is_usable(self) -> bool:
        """Whether a new call may be tried."""
        return not self.is_over and not self._is_leaving and self._next_stream < _MAX_STREAM

    async def call(self, head: bytes, request: bytes) -> bytes:
        """Send a request (`head`: its header block) and return the answer. Raises grpc.aio.AioRpcError.

        Cancelled it has the call cancelled at the peer.
        """
        while len(self._calls) >= self._max_calls and self.is_usable:
            await self._take_turn()
        if not self.is_usable:
            raise self._error
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        answer: asyncio.Future[bytes] = self._loop.create_future()
        call = self._calls[stream] = _Call(answer, self._initial_window)
        self._send(frames.header_frames(stream, head, end=False, limit=frames.DEFAULT_FRAME_SIZE))
        call.unsent = b"\0" + len(request).to_bytes(4, "big") + request
        self._send_more(stream, call)
        try:
            return await answer
        finally:
            if self._calls.pop(stream, None) is not None:
                self._reset(stream)
            self._next_turn()
            if self._is_leaving and not self._calls and not self.is_over:
                self.close()

    def leave(self) -> None:
        """Take no new calls; hang up once the last one is over."""
        self._is_leaving = True
        if not self._calls:
            self.close()

    def close(self) -> None:
        """End what is under way (UNAVAILABLE) and hang up."""
        self._fail(grpc.StatusCode.UNAVAILABLE, "the channel is closed")

    async def _take_turn(self) -> None:
        turn: asyncio.Future[None] = self._loop.create_future()
        self._turns.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next_turn()
            raise

    def _next_turn(self) -> None:
        while self._turns and len(self._calls) < self._max_calls:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    # What the base class calls.

    def _take_data(self, stream: int, flags: int, payload: bytes) -> None:
        self._owed += len(payload)
        if self._owed > frames.STREAM_WINDOW:
            raise frames.Violation(frames.FLOW_CONTROL_ERROR, "more than the window")
        if self._owed >= _OWED:
            self._send(frames.window_update(0, self._owed))
            self._owed = 0
        call = self._calls.get(stream)
        if call is None:
            return
        if flags & frames.END_STREAM:
            raise frames.Violation(frames.PROTOCOL_ERROR, "a call ended without a status")
        call.owed += len(payload)
        if call.owed > frames.STREAM_WINDOW:
            raise frames.Violation(frames.FLOW_CONTROL_ERROR, "more than the window")
        call.body += frames.content(flags, payload, prioritised=False)
        limit = self._config.max_message_bytes
        size = int.from_bytes(call.body[1:5], "big") if len(call.body) >= frames.MESSAGE_HEAD else 0
        if max(size, len(call.body) - frames.MESSAGE_HEAD) > limit:
            what = f"Received message larger than max ({size} vs. {limit})"
            self._fail_call(stream, rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, what))
        elif call.owed >= _OWED:
            self._send(frames.window_update(stream, call.owed))
            call.owed = 0

    def _take_status(self, stream: int, error: grpc.aio.AioRpcError) -> None:
        call = self._calls.pop(stream, None)
        if call is None or call.answer.done():
            return
        body = call.body
        if error.code() is not grpc.StatusCode.OK:
            call.answer.set_exception(error)
        elif len(body) < frames.MESSAGE_HEAD or int.from_bytes(body[1:5], "big") != len(body) - frames.MESSAGE_HEAD:
            what = "the answer is not exactly one message"
            call.answer.set_exception(rpc_error(grpc.StatusCode.INTERNAL, what))
        elif body[0]:
            what = "a message is compressed, which nobody asked for"
            call.answer.set_exception(rpc_error(grpc.StatusCode.INTERNAL, what))
        else:
            call.answer.set_result(bytes(body[frames.MESSAGE_HEAD :]))

    def _take_room(self, stream: int, more: int) -> None:
        call = self._calls.get(stream)
        if call is not None:
            call.window += more
            if call.window > frames.MAX_WINDOW:
                raise frames.Violation(frames.FLOW_CONTROL_ERROR, "the window is wrong")
            self._send_more(stream, call)
        elif stream == 0:
            for one, waiting in list(self._calls.items()):
                self._send_more(one, waiting)

    def _resize_windows(self, change: int) -> None:
        for call in self._calls.values():
            call.window += change

    def _take_setting(self, key: int, value: int) -> None:
        super()._take_setting(key, value)
        if key == frames.MAX_CONCURRENT_STREAMS:
            self._max_calls = value
            for _ in range(min(len(self._turns), value - len(self._calls))):
                self._next_turn()

    def _take_goaway(self, last_stream: int) -> None:
        self._is_leaving = True
        for stream in [stream for stream in self._calls if stream > last_stream]:
            self._fail_call(stream, rpc_error(grpc.StatusCode.UNAVAILABLE, "the peer takes no calls"))
        self._wake_turns()

    def _end_all(self, error: grpc.aio.AioRpcError) -> None:
        self._error = error
        self._flush()
        self._hang_up()
        for stream in list(self._calls):
            self._fail_call(stream, error)
        self._wake_turns()

    # The rest.

    def _fail_call(self, stream: int, error: grpc.aio.AioRpcError) -> None:
        call = self._calls.pop(stream)
        if not call.answer.done():
            call.answer.set_exception(error)
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self._reset(stream)

    def _wake_turns(self) -> None:
        for turn in self._turns:
            wake(turn)
        self._turns.clear()

    def _reset(self, stream: int) -> None:
        self._send(frames.frame(frames.RST_STREAM, 0, stream, frames.CANCEL.to_bytes(4, "big")))

    def _send_more(self, stream: int, call: _Call) -> None:
        """As much of a request as there is room for."""
        while call.unsent and not self._is_paused:
            room = min(call.window, self._connection_window, frames.DEFAULT_FRAME_SIZE)
            if room <= 0:
                return
            part, call.unsent = call.unsent[:room], call.unsent[room:]
            call.window -= len(part)
            self._connection_window -= len(part)
            flags = 0 if call.unsent else frames.END_STREAM
            self._send(frames.frame(frames.DATA, flags, stream, part))

    def _send(self, data: bytes) -> None:
        """Queue bytes: what is sent in one turn of the event loop leaves together."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            super()._send(b"".join(out))
