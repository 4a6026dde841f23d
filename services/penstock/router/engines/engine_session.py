"""Session over another engine: our commands in, calls of its Generate out, and their messages as our events.

An engine has a stream for each sequence. Events of one turn of the event loop go on as one message, as an engine's step
does on our own sessions. Nothing is awaited for a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from penstock.common.errors import (
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unavailable,
    from_rpc_error,
    to_status,
)
from penstock.common.logging import get_logger
from penstock.router.aio import is_cancelled
from penstock.router.engines.engine_attempt import EngineAttempt, EngineSequence
from penstock.router.engines.engine_codec import EngineCodec
from penstock.router.engines.engine_model import EngineModel
from penstock.router.engines.engine_request import resolve_request
from penstock.serving.transport import Channel, StreamCall
from penstock.v1 import generation_pb2

_log = get_logger("penstock.router")
# Statuses that are about the request itself; after any other it may run elsewhere.
_OF_THE_REQUEST = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED)
# Longest wait for the status of a call that has told its end.
_END_SECONDS = 5.0
# Longest wait for aborts when the connection is given up.
_CLOSE_SECONDS = 1.0


class _LiveAttempt:
    """An attempt, its calls, and its timer."""

    def __init__(self, attempt: EngineAttempt) -> None:
        self.attempt = attempt
        self.calls: dict[str, StreamCall[Any]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.timer: asyncio.TimerHandle | None = None


class EngineSession:
    """Session of one connection. Implements StreamCall. Belongs to one event loop."""

    def __init__(
        self,
        channel: Channel,
        codec: EngineCodec,
        model: EngineModel,
        send_aborts: Callable[[Sequence[str]], Awaitable[None]],
        silence_seconds: float,
    ) -> None:
        """Make it. `send_aborts` ends requests there by their ids; `silence_seconds`: an engine with requests may be
        without a token for so long while it tells that it is healthy."""
        self._channel = channel
        self._codec = codec
        self._model = model
        self._send_aborts = send_aborts
        self._silence_seconds = silence_seconds
        self._live: dict[tuple[str, int], _LiveAttempt] = {}
        self._aborting: set[asyncio.Task[None]] = set()
        self._take: Callable[[generation_pb2.SessionResponse], None] | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Nobody may be waiting for it any more.
        self._failed.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._message = generation_pb2.SessionResponse()
        self._is_due = False
        self._heard_at = time.monotonic()
        self.write: Callable[[Message], Awaitable[None]] = self._write

    @property
    def num_calls(self) -> int:
        """Number of sequences that the engine generates for us."""
        return sum(len(live.calls) for live in self._live.values())

    def note_alive(self) -> None:
        """Note that the engine tells it is healthy: the session is not silent, unless it has long been without a
        token."""
        if time.monotonic() - self._heard_at < self._silence_seconds or not self._live:
            self._message.heartbeat = True
            self._flush_soon()

    async def _write(self, message: Message) -> None:
        await self.write_all((message,))

    async def write_all(self, requests: Iterable[Message]) -> None:
        """Carry out commands."""
        for command in requests:
            if not isinstance(command, generation_pb2.SessionRequest):
                raise TypeError("a session takes SessionRequests")
            if command.HasField("abort"):
                self._abort(command.abort.request_id, command.abort.attempt_epoch)
            else:
                self._submit(command.submit, command.handle)

    async def run(self, take: Callable[[generation_pb2.SessionResponse], None]) -> None:
        """Hand every message to `take`. It ends only with an error: grpc.aio.AioRpcError when the connection is lost,
        or what `take` raises."""
        self._take = take
        self._flush_soon()
        await self._failed

    async def receive(self) -> generation_pb2.SessionResponse | None:
        """Not there: the router reads by `run`."""
        raise RuntimeError("a session of another engine is read by run")

    async def done_writing(self) -> None:
        """Do nothing: the engine has no stream to half-close."""

    def cancel(self) -> object:
        """Give every request up."""
        for key in list(self._live):
            self._abort(*key)
        if not self._failed.done():
            self._failed.cancel()
        return True

    async def close(self) -> None:
        """Wait until the aborts are sent, for a second at most."""
        if self._aborting:
            await asyncio.wait(self._aborting, timeout=_CLOSE_SECONDS)
        for task in self._aborting:
            task.cancel()

    def _submit(self, message: generation_pb2.GenerateRequest, handle: int) -> None:
        key = message.request_id, message.attempt_epoch
        try:
            request = resolve_request(message, self._model)
        except PenstockError as error:
            self._refuse(key, error)
            return
        if not self._live:
            self._heard_at = time.monotonic()
        attempt = EngineAttempt(request, self._model.facts.name, handle, lambda event: self._emit(key, event))
        live = self._live[key] = _LiveAttempt(attempt)
        attempt.begin()
        for sequence in attempt.live:
            task = asyncio.create_task(self._generate(key, live, sequence))
            live.tasks.add(task)
            task.add_done_callback(live.tasks.discard)
        if request.params.max_time is not None:
            loop = asyncio.get_running_loop()
            live.timer = loop.call_later(request.params.max_time, self._end_in_time, key)
        if attempt.is_over:
            self._let_end(key)

    async def _generate(self, key: tuple[str, int], live: _LiveAttempt, sequence: EngineSequence) -> None:
        """Run the call of one sequence to its end."""
        attempt, codec = live.attempt, self._codec
        read, take, request = codec.read, attempt.take, attempt.request

        def on_message(message: Any) -> None:
            self._heard_at = time.monotonic()
            take(sequence, read(message, request))
            if attempt.is_over and self._live.get(key) is live:
                self._let_end(key)

        try:
            message = codec.generate(request, sequence.index, sequence.call_id)
            call = await self._channel.open_stream(codec.generate_method, codec.response.FromString)
            live.calls[sequence.call_id] = call
            try:
                await call.write(message)
                await call.done_writing()
                await call.run(on_message)
            except asyncio.InvalidStateError:
                # The call was over before all was written: its status tells why.
                await call.run(on_message)
            if sequence.result is None and self._live.get(key) is live:
                self._lose(key, Unavailable("the engine ended a stream without its end", reason="BACKEND_LOST"))
        except grpc.aio.AioRpcError as error:
            if self._live.get(key) is live:
                self._fail(key, error)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            if self._live.get(key) is live:
                self._lose(key, Unavailable("the call was cancelled", reason="BACKEND_LOST"))
        except Exception as error:
            # A bug here, or of the session that takes the events: the connection cannot be trusted.
            self._break(error)
        finally:
            live.calls.pop(sequence.call_id, None)

    def _fail(self, key: tuple[str, int], error: grpc.aio.AioRpcError) -> None:
        failure = from_rpc_error(error)
        if failure.code is grpc.StatusCode.UNAVAILABLE and failure.reason == "UNKNOWN":
            self._break(error)
        elif failure.code in _OF_THE_REQUEST:
            # The engine's words may hold a prompt, so they stay out of the answer.
            _log.warning("the engine refused a request", engine=self._codec.name, code=failure.code.name)
            self._refuse(key, _named(failure, self._codec.name))
            self._abort(*key)
        else:
            self._lose(key, Unavailable(f"{self._codec.name} failed", reason="BACKEND_LOST"))

    def _lose(self, key: tuple[str, int], error: PenstockError) -> None:
        """End an attempt that may run elsewhere."""
        self._refuse(key, error)
        self._abort(*key)

    def _break(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    def _end_in_time(self, key: tuple[str, int]) -> None:
        live = self._live.get(key)
        if live is not None:
            live.attempt.end_in_time()
            self._abort(*key)

    def _abort(self, request_id: str, attempt_epoch: int) -> None:
        """Give a request up. A stream that is dropped does not stop every engine, so it is always told."""
        key = request_id, attempt_epoch
        live = self._live.get(key)
        if live is None:
            return
        live.attempt.is_over = True
        ids = [sequence.call_id for sequence in live.attempt.sequences if sequence.call_id in live.calls]
        # A call that is not open yet never reaches the engine.
        self._forget(key)
        if ids:
            task = asyncio.create_task(self._abort_there(ids))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def _abort_there(self, ids: list[str]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._send_aborts(ids)

    def _forget(self, key: tuple[str, int]) -> None:
        """Drop an attempt and its calls."""
        live = self._live.pop(key)
        if live.timer is not None:
            live.timer.cancel()
        _drop(live)

    def _let_end(self, key: tuple[str, int]) -> None:
        """Let the calls of an attempt end by themselves: they have said all but their status."""
        live = self._live.pop(key)
        if live.timer is not None:
            live.timer.cancel()
        live.timer = asyncio.get_running_loop().call_later(_END_SECONDS, _drop, live)

    def _refuse(self, key: tuple[str, int], error: PenstockError) -> None:
        status = to_status(error)
        event = generation_pb2.SessionEvent()
        event.error.CopyFrom(
            generation_pb2.RequestError(
                code=status.code, message=status.message, status_details=status.SerializeToString()
            )
        )
        self._emit(key, event)

    def _emit(self, key: tuple[str, int], event: generation_pb2.SessionEvent) -> None:
        if not event.HasField("tokens"):
            event.request_id, event.attempt_epoch = key
        self._message.events.append(event)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        if self._take is None or self._failed.done():
            return
        message, self._message = self._message, generation_pb2.SessionResponse()
        if not message.events and not message.heartbeat:
            return
        try:
            self._take(message)
        except Exception as error:
            self._break(error)


def _drop(live: _LiveAttempt) -> None:
    current = asyncio.current_task()
    for task in live.tasks:
        if task is not current:
            task.cancel()
    for call in live.calls.values():
        call.cancel()


def _named(failure: PenstockError, engine: str) -> PenstockError:
    """Return the engine's own refusal of a request, without its words."""
    if failure.code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidArgument("request", f"{engine} refused it: its log has the reason", reason="NOT_ON_BACKEND")
    if failure.code is grpc.StatusCode.NOT_FOUND:
        return NotFound(f"{engine} does not find what the request names", reason="MODEL_NOT_FOUND", field="model")
    return ResourceExhausted(f"{engine} has no room for the request", reason="QUEUE_FULL", retry_after_seconds=1.0)
