"""Calls that grpc.aio is asked for ahead: in their order, not more than a bound, and an end for who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from factories.servers.router import until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.serving.grpc_accepting import _CALLS_AHEAD, CallLine, make_server


class Asked:
    """Calls that were asked for; the test lets them come."""

    def __init__(self) -> None:
        self.futures: list[asyncio.Future[Any]] = []

    def __call__(self) -> asyncio.Future[Any]:
        self.futures.append(asyncio.get_running_loop().create_future())
        return self.futures[-1]

    async def come(self, calls: Sequence[str]) -> None:
        for call in calls:
            next(one for one in self.futures if not one.done()).set_result(call)
        await asyncio.sleep(0)


async def test_a_crowd_is_taken_without_another_question() -> None:
    asked = Asked()
    line = CallLine(asked)
    first = line.next()
    crowd = [str(number) for number in range(_CALLS_AHEAD)]
    await asked.come(crowd)
    taken = [await first]
    while len(taken) < len(crowd):
        following = line.next()
        # It is there at once: nobody had to ask and to wait.
        assert following.done()
        taken.append(following.result())
    assert taken == crowd


async def test_no_more_calls_are_held_than_were_asked_for_ahead() -> None:
    asked = Asked()
    line = CallLine(asked)
    line.next()
    await asked.come(["a"] * _CALLS_AHEAD)
    for _ in range(5):
        line.next()
    assert len(asked.futures) == _CALLS_AHEAD + 5


@pytest.mark.parametrize("ends", ["error", "cancelled"])
async def test_who_waits_learns_of_the_end(ends: str) -> None:
    asked = Asked()
    waiting = CallLine(asked).next()
    for one in asked.futures:
        if ends == "error":
            one.set_exception(ConnectionError("the server stops"))
        else:
            one.cancel()
    with pytest.raises(ConnectionError if ends == "error" else asyncio.CancelledError):
        await waiting


async def test_the_grpcio_that_is_installed_asks_ahead() -> None:
    server: Any = make_server((), (), 8)
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await until(lambda: bool(server._server._lines))
    (line,) = server._server._lines.values()
    assert len(line._asked) == _CALLS_AHEAD
    await server.stop(None)


async def test_a_later_grpcio_accepts_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise TypeError("other arguments")

    monkeypatch.setattr("penstock.serving.grpc_accepting._AskingServer", refuse)
    server = make_server((), (), 8)
    assert isinstance(server, grpc.aio.Server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(None)


async def test_calls_that_nobody_takes_are_let_go_at_the_end() -> None:
    asked = Asked()
    line = CallLine(asked)
    line.next()
    await asked.come(["taken", "here"])
    assert line.has_calls
    line.end()
    await asked.come(["late"])
    assert not line.has_calls


async def test_a_closed_line_still_learns_of_the_stop() -> None:
    asked = Asked()
    line = CallLine(asked)
    line.next()
    line.close()
    await asked.come([str(number) for number in range(_CALLS_AHEAD)])
    while line.has_calls:
        line.next()
    waiting = line.next()
    (last,) = (one for one in asked.futures if not one.done())
    last.set_exception(ConnectionError("the server stops"))
    with pytest.raises(ConnectionError):
        await waiting


class Answering(grpc.GenericRpcHandler):
    """Answers every call."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def answer(request: bytes, context: Any) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(answer)


async def test_calls_that_came_before_a_stop_are_answered() -> None:
    server: Any = make_server((), (), 1000)
    server.add_generic_rpc_handlers((Answering(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method = channel.unary_unary("/a/b")
        await method(b"")
        (line,) = server._server._lines.values()
        crowd = [asyncio.ensure_future(method(b"")) for _ in range(_CALLS_AHEAD // 2)]
        while not line.has_calls:  # noqa: ASYNC110 - another pace would miss the moment
            await asyncio.sleep(0)
        here = len(line._here)
        # Calls that are held until the end of the grace would be cut off then.
        await server.stop(60)
        answers = await asyncio.gather(*crowd, return_exceptions=True)
    assert answers.count(b"") >= here
