"""Connections of both kinds, and reading a stream from them: everything that the two clients do not share.

`_sync.py` is made from `_async.py`, so both classes here have the same methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from queue import SimpleQueue
from typing import Any, Protocol

import grpc
from penstock.common.proxies import through_proxy
from penstock.v1 import admin_pb2_grpc, jobs_pb2_grpc, model_pb2_grpc, router_pb2_grpc, text_pb2_grpc

from penstock_client._exceptions import PenstockError
from penstock_client.config import ClientConfig

# A stream has ended. grpc-stubs knows neither this nor the types of what asynchronous stubs return.
END: Any = grpc.aio.EOF  # type: ignore[attr-defined]


# Details of the status that grpc.aio invents when a call ends while it writes.
_MADE_UP = "Internal error from Core"
# Errors that are a prompt's answer.
_FAILURES = (PenstockError, TypeError, ValueError)
# Answers that may wait for an earlier one, per prompt that is with the server.
_WAITING_SHARE = 8


class AsyncEvents(Protocol):
    """Events of a call as the client reads them, whatever transport carries it. Calls of Penstock's own (its HTTP/2's
    Answers) have these methods; grpc.aio's get them by `AsyncChannel.events`. All raise grpc.RpcError."""

    async def read_all(self) -> list[Any]:
        """Return the events that have come, at least one; none at the end."""

    async def run(self, take: Callable[[list[Any]], bool]) -> bool:
        """Hand over the events that come until `take` returns False, or to the end: that is returned as True."""

    def cancel(self) -> object:
        """Cancel the call, unless it is over."""


class _AioEvents:
    """AsyncEvents of grpc.aio's calls, which give one at a time."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def read_all(self) -> list[Any]:
        event = await self._call.read()
        return [] if event is END else [event]

    async def run(self, take: Callable[[list[Any]], bool]) -> bool:
        while events := await self.read_all():
            if not take(events):
                return False
        return True

    def cancel(self) -> object:
        return self._call.cancel()


class Events:
    """The same of grpc's synchronous calls."""

    def __init__(self, call: Any) -> None:
        """Take gRPC's call."""
        self._call = call

    def read_all(self) -> list[Any]:
        """Return the next event in a list, which is empty at the end."""
        return list(islice(self._call, 1))

    def run(self, take: Callable[[list[Any]], bool]) -> bool:
        """Hand over the events that come until `take` returns False, or to the end: that is returned as True."""
        while events := self.read_all():
            if not take(events):
                return False
        return True

    def cancel(self) -> object:
        """Cancel the call, unless it is over."""
        return self._call.cancel()


class _OwnStatus:
    """Status that a server gave a call: grpc.aio may precede or replace it by one of its own if the call ends while a
    message is sent."""

    def __init__(self, call: Any) -> None:
        """Follow a call that has just begun."""
        # None for OK.
        self.error: asyncio.Future[grpc.RpcError | None] = asyncio.get_running_loop().create_future()
        call.add_done_callback(self._note)

    def _note(self, call: Any) -> None:
        """Keep a status; called for each status of the call."""
        details = _value(call.details())
        if self.error.done() or details == _MADE_UP:
            return
        code, trailers = _value(call.code()), _value(call.trailing_metadata())
        is_ok = code is grpc.StatusCode.OK
        self.error.set_result(None if is_ok else grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details, ""))


class AsyncExchange:
    """A call with messages both ways. Errors have the call's own status."""

    def __init__(self, method: Any, **options: Any) -> None:
        """Begin the call; `options` are gRPC's."""
        self._call = method(**options)
        self._status = _OwnStatus(self._call)

    async def send(self, message: Any) -> None:
        """Send a message; after the end it is dropped. Raises grpc.RpcError for a failed call."""
        try:
            await self._call.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):
            await self._raise_error()

    async def end(self) -> None:
        """Signal that no message follows."""
        # The call is over: `read` has its status.
        with contextlib.suppress(grpc.aio.InternalError):
            await self._call.done_writing()

    async def read(self) -> Any:
        """Return the next answer, or END. Raises grpc.RpcError."""
        try:
            return await self._call.read()
        except grpc.RpcError:
            await self._raise_error()
            return END

    def cancel(self) -> None:
        """Cancel the call, unless it is over."""
        self._call.cancel()

    async def _raise_error(self) -> None:
        if (error := await self._status.error) is not None:
            raise error


def _value(known: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits."""
    try:
        known.send(None)
    except StopIteration as done:
        return done.value
    known.close()
    raise RuntimeError("it waits")


class AsyncChannel:
    """A connection for one event loop."""

    def __init__(self, address: str, config: ClientConfig, channel: Any = None) -> None:
        """Open it, or use a `channel` that another closes. Raises ValueError and OSError for the files of
        `config.tls`."""
        options = config.channel_options(address)
        self._is_own = channel is None
        # Words for errors where connections go through a proxy.
        self.through = through_proxy(address) if self._is_own else ""
        if channel is not None:
            self._channel = channel
        elif config.tls:
            self._channel = grpc.aio.secure_channel(address, config.tls.credentials(), options)
        else:
            self._channel = grpc.aio.insecure_channel(address, options)
        self.stub: Any = text_pb2_grpc.TextServiceStub(self._channel)
        self.admin_stub: Any = admin_pb2_grpc.GenerationAdminServiceStub(self._channel)
        self.models: Any = model_pb2_grpc.ModelServiceStub(self._channel)
        self.router: Any = router_pb2_grpc.RouterAdminServiceStub(self._channel)
        self.jobs: Any = jobs_pb2_grpc.JobsServiceStub(self._channel)

    async def wait_ready(self, timeout: float) -> None:
        """Wait until connected. Raises TimeoutError after `timeout` seconds."""
        async with asyncio.timeout(timeout):
            await self._channel.channel_ready()

    async def close(self) -> None:
        """End running calls at once."""
        if self._is_own:
            await self._channel.close(None)

    @staticmethod
    def events(call: Any) -> AsyncEvents:
        """Return a call's events: the call itself, where its transport hands over all that have come."""
        # By name: isinstance() of a Protocol takes thirty times as long, and this is done for every stream.
        return call if hasattr(call, "read_all") else _AioEvents(call)

    @staticmethod
    async def answer(method: Any, messages: Iterable[Any], **options: Any) -> Any:
        """Send all messages and return the only answer. Raises grpc.RpcError with the server's own status, also where
        the server refused the call while they were sent."""
        call = method(messages, **options)
        status = _OwnStatus(call)
        try:
            return await call
        except grpc.aio.AioRpcError as made:
            # The call is over, so a status that the server gave is known.
            if made.details() == _MADE_UP and status.error.done() and (error := status.error.result()) is not None:
                raise error from made
            raise

    @staticmethod
    async def results(open_stream: Callable[[Any], Any], prompts: Iterable[Any], most: int) -> AsyncIterator[Any]:
        """Open a stream for each prompt, `most` at once. Yield their answers, or the errors of those that failed, in
        order; `prompts` is read as there is room."""
        turns = asyncio.Semaphore(most)
        tasks: deque[asyncio.Task[Any]] = deque()

        async def answer(prompt: Any) -> Any:
            try:
                async with open_stream(prompt) as stream:
                    return await stream.result()
            except _FAILURES as error:
                return error
            finally:
                turns.release()

        try:
            for prompt in prompts:
                await turns.acquire()
                tasks.append(asyncio.create_task(answer(prompt)))
                while tasks and (tasks[0].done() or len(tasks) >= _WAITING_SHARE * most):
                    yield await tasks.popleft()
            while tasks:
                yield await tasks.popleft()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Exchange:
    """A call with messages both ways, for one thread."""

    def __init__(self, method: Any, **options: Any) -> None:
        """Begin the call; `options` are gRPC's."""
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._call = method(iter(self._messages.get, None), **options)

    def send(self, message: Any) -> None:
        """Send a message."""
        self._messages.put(message)

    def end(self) -> None:
        """Tell that no message follows."""
        self._messages.put(None)

    def read(self) -> Any:
        """Return the next answer, or END. Raises grpc.RpcError."""
        return next(self._call, END)

    def cancel(self) -> None:
        """Cancel the call, unless it is over."""
        # gRPC's thread may wait for a message.
        self._messages.put(None)
        self._call.cancel()


class Channel:
    """A connection that threads may share."""

    def __init__(self, address: str, config: ClientConfig, channel: Any = None) -> None:
        """Open it, or use a `channel` that another closes. Raises ValueError and OSError for the files of
        `config.tls`."""
        options = config.channel_options(address)
        self._is_own = channel is None
        # Words for errors where connections go through a proxy.
        self.through = through_proxy(address) if self._is_own else ""
        if channel is not None:
            self._channel = channel
        elif config.tls:
            self._channel = grpc.secure_channel(address, config.tls.credentials(), options)
        else:
            self._channel = grpc.insecure_channel(address, options)
        self.stub: Any = text_pb2_grpc.TextServiceStub(self._channel)
        self.admin_stub: Any = admin_pb2_grpc.GenerationAdminServiceStub(self._channel)
        self.models: Any = model_pb2_grpc.ModelServiceStub(self._channel)
        self.router: Any = router_pb2_grpc.RouterAdminServiceStub(self._channel)
        self.jobs: Any = jobs_pb2_grpc.JobsServiceStub(self._channel)

    def wait_ready(self, timeout: float) -> None:
        """Block until connected. Raises TimeoutError after `timeout` seconds."""
        try:
            grpc.channel_ready_future(self._channel).result(timeout)
        except grpc.FutureTimeoutError:
            raise TimeoutError from None

    def close(self) -> None:
        """End running calls at once."""
        if self._is_own:
            self._channel.close()

    @staticmethod
    def events(call: Any) -> Events:
        """Return a call's events."""
        return Events(call)

    @staticmethod
    def answer(method: Any, messages: Iterable[Any], **options: Any) -> Any:
        """Send all messages and return the only answer. Raises grpc.RpcError."""
        return method(iter(messages), **options)

    @staticmethod
    def results(open_stream: Callable[[Any], Any], prompts: Iterable[Any], most: int) -> Iterator[Any]:
        """Open a stream for each prompt, `most` at once. Yield their answers, or the errors of those that failed, in
        order; `prompts` is read as there is room."""
        turns = threading.Semaphore(most)
        answers: deque[Future[Any]] = deque()
        streams: set[Any] = set()
        is_over = threading.Event()

        def answer(prompt: Any) -> Any:
            try:
                with open_stream(prompt) as stream:
                    streams.add(stream)
                    try:
                        # It may have been opened after the streams were closed.
                        return None if is_over.is_set() else stream.result()
                    finally:
                        streams.discard(stream)
            except _FAILURES as error:
                return error
            finally:
                turns.release()

        pool = ThreadPoolExecutor(most, thread_name_prefix="penstock-prompts")
        try:
            for prompt in prompts:
                turns.acquire()
                answers.append(pool.submit(answer, prompt))
                while answers and (answers[0].done() or len(answers) >= _WAITING_SHARE * most):
                    yield answers.popleft().result()
            while answers:
                yield answers.popleft().result()
        finally:
            # An interrupted caller, or one that leaves, must not wait for unread answers.
            is_over.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for stream in tuple(streams):
                stream.close()
            pool.shutdown()
