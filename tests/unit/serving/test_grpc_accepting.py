"""Calls that grpc.aio is asked for ahead: all that came begin in one turn, and more are asked for where all came."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from factories.servers.router import until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.serving import grpc_accepting
from penstock.serving.grpc_accepting import _FEW_AHEAD, _MOST_AHEAD, CallLine, make_server


class Asked:
    """Calls that were asked for; the test lets them come."""

    def __init__(self) -> None:
        self.futures: list[asyncio.Future[Any]] = []
        self.begun: list[str] = []
        self.is_open = True

    def line(self) -> CallLine:
        return CallLine(self._ask, self.begun.append, lambda: self.is_open)

    def _ask(self) -> asyncio.Future[Any]:
        self.futures.append(asyncio.get_running_loop().create_future())
        return self.futures[-1]

    @property
    def waiting(self) -> list[asyncio.Future[Any]]:
        return [one for one in self.futures if not one.done()]

    async def come(self, calls: Sequence[str]) -> None:
        """Let calls come, each to a question that waits; in one turn of the loop."""
        for call, future in zip(calls, self.waiting, strict=True):
            future.set_result(call)
        await asyncio.sleep(0)


async def test_all_calls_that_came_begin_in_one_turn() -> None:
    asked = Asked()
    asked.line()
    assert len(asked.waiting) == _FEW_AHEAD
    calls = [str(number) for number in range(_FEW_AHEAD)]
    await asked.come(calls)
    assert asked.begun == calls


async def test_more_are_asked_for_where_all_came_in_a_turn() -> None:
    asked = Asked()
    asked.line()
    seen = []
    for _ in range(8):
        await asked.come(["a"] * len(asked.waiting))
        await asyncio.sleep(0)
        seen.append(len(asked.waiting))
    assert seen[0] == 2 * _FEW_AHEAD
    assert seen[-1] == max(seen) == _MOST_AHEAD
    assert len(asked.begun) == len(asked.futures) - _MOST_AHEAD


async def test_calls_that_come_one_by_one_need_no_more_questions() -> None:
    asked = Asked()
    asked.line()
    for number in range(10):
        asked.waiting[0].set_result(str(number))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(asked.waiting) == _FEW_AHEAD
    assert asked.begun == [str(number) for number in range(10)]


@pytest.mark.parametrize("ends", ["error", "cancelled"])
async def test_nothing_is_asked_for_once_the_server_stops(ends: str) -> None:
    asked = Asked()
    line = asked.line()
    asked.is_open = False
    for one in asked.waiting:
        if ends == "error":
            one.set_exception(ConnectionError("the server stops"))
        else:
            one.cancel()
    await asyncio.sleep(0)
    assert (line.num_asked, asked.waiting, asked.begun) == (0, [], [])


async def test_a_call_that_came_before_the_stop_begins() -> None:
    asked = Asked()
    asked.line()
    asked.is_open = False
    asked.waiting[0].set_result("late")
    await asyncio.sleep(0)
    assert asked.begun == ["late"]


async def test_the_grpcio_that_is_installed_asks_ahead_for_each_method() -> None:
    server: Any = make_server((), (), 8)
    health_pb2_grpc.add_HealthServicer_to_server(health_pb2_grpc.HealthServicer(), server)
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await until(lambda: bool(server._server._lines))
    lines = server._server._lines
    assert {b"/grpc.health.v1.Health/Check", b"/grpc.health.v1.Health/Watch"} <= set(lines)
    assert {line.num_asked for line in lines.values()} == {_FEW_AHEAD}
    await server.stop(None)


async def test_more_calls_than_are_allowed_are_refused() -> None:
    free = asyncio.Event()

    class Slow(health_pb2_grpc.HealthServicer):
        async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
            await free.wait()
            return health_pb2.HealthCheckResponse()

    server: Any = make_server((), (), 2)
    health_pb2_grpc.add_HealthServicer_to_server(Slow(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Check(health_pb2.HealthCheckRequest()) for _ in range(5)]
        refused = [one for one in calls if one.done()]
        async with asyncio.timeout(60):
            while len(refused) < 3:
                await asyncio.sleep(0.01)
                refused = [one for one in calls if one.done()]
            assert {await one.code() for one in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            free.set()
            assert [await one.code() for one in calls].count(grpc.StatusCode.OK) == 2
            assert await stub.Check(health_pb2.HealthCheckRequest()) == health_pb2.HealthCheckResponse()
    await server.stop(None)


@pytest.mark.parametrize("later", ["arguments", "steps of a call"])
async def test_a_later_grpcio_accepts_by_itself(monkeypatch: pytest.MonkeyPatch, later: str) -> None:
    def refuse(*arguments: Any) -> None:
        raise TypeError("other arguments")

    if later == "arguments":
        monkeypatch.setattr(grpc_accepting, "_AskingServer", refuse)
    else:
        monkeypatch.setattr(grpc_accepting, "_IS_KNOWN", False)
    server = make_server((), (), 8)
    assert isinstance(server, grpc.aio.Server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(None)
