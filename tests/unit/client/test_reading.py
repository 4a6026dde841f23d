"""`AsyncStream.read` and `run`: the deltas that have come, from calls that give what waits, and from grpc.aio's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from factories.wire.conversation import user
from penstock.common.errors import Internal
from penstock.v1 import generation_pb2, text_pb2
from penstock_client import AsyncClient, Delta


class Call:
    """A call whose events come in these batches."""

    def __init__(self, *batches: list[text_pb2.ChatResponse]) -> None:
        self._batches = list(batches)
        self.is_cancelled = False

    async def read_all(self) -> list[text_pb2.ChatResponse]:
        return self._batches.pop(0) if self._batches else []

    async def run(self, take: Callable[[list[text_pb2.ChatResponse]], bool]) -> bool:
        while events := await self.read_all():
            if not take(events):
                return False
        return True

    def cancel(self) -> None:
        self.is_cancelled = True


class AioCall:
    """A call of grpc.aio, which gives its events one by one."""

    def __init__(self, *batches: list[text_pb2.ChatResponse]) -> None:
        self._events = [event for batch in batches for event in batch]
        self.is_cancelled = False

    async def read(self) -> Any:
        return self._events.pop(0) if self._events else grpc.aio.EOF  # type: ignore[attr-defined]

    def cancel(self) -> None:
        self.is_cancelled = True


class Channel:
    """A channel of grpc.aio as stubs use it, with one call."""

    def __init__(self, call: Call | AioCall) -> None:
        self._call = call

    def unary_stream(self, *_: Any, **__: Any) -> Any:
        return lambda *_, **__: self._call

    unary_unary = stream_unary = stream_stream = unary_stream


STARTED = text_pb2.ChatResponse(started=generation_pb2.Started(request_id="r"))
FINISHED = text_pb2.ChatResponse(finished=generation_pb2.Finished())


def delta(seq: int) -> text_pb2.ChatResponse:
    return text_pb2.ChatResponse(delta=text_pb2.ChatDelta(seq=seq, text=f"t{seq}"))


async def test_deltas_that_have_come_are_read_together() -> None:
    call = Call([STARTED], [delta(0)], [delta(1), delta(2), FINISHED])
    stream = AsyncClient("127.0.0.1:1", channel=Channel(call)).stream(user("Hello"))
    assert await stream.read() == [Delta(0, 0, "t0")]
    assert await stream.read() == [Delta(1, 0, "t1"), Delta(2, 0, "t2")]
    assert await stream.read() == []
    assert stream.state.completion().text == "t0t1t2"


async def test_iteration_goes_on_where_reading_stopped() -> None:
    call = Call([STARTED, delta(0)], [delta(1), delta(2), FINISHED])
    stream = AsyncClient("127.0.0.1:1", channel=Channel(call)).stream(user("Hello"))
    assert await anext(stream) == Delta(0, 0, "t0")
    assert await anext(stream) == Delta(1, 0, "t1")
    assert await stream.read() == [Delta(2, 0, "t2")]
    assert [one async for one in stream] == []


@pytest.mark.parametrize(
    ("batches", "reason"),
    [([[STARTED, delta(1)]], "PROTOCOL"), ([[STARTED, delta(0)]], "TRUNCATED_STREAM")],
    ids=["a gap", "no end"],
)
async def test_a_stream_that_breaks_the_protocol_is_cancelled(batches: Any, reason: str) -> None:
    call = Call(*batches)
    stream = AsyncClient("127.0.0.1:1", channel=Channel(call)).stream(user("Hello"))
    with pytest.raises(Internal) as caught:
        await stream.result()
    assert caught.value.reason == reason
    assert call.is_cancelled


@pytest.mark.parametrize(
    ("kind", "first", "rest"),
    [(Call, [[0], [1, 2]], [[3]]), (AioCall, [[0], [1]], [[2], [3]])],
    ids=["together", "one by one"],
)
async def test_deltas_are_handed_on_until_no_more_are_taken_and_then_to_the_end(
    kind: type[Call | AioCall], first: list[list[int]], rest: list[list[int]]
) -> None:
    call = kind([STARTED], [delta(0)], [delta(1), delta(2)], [delta(3)], [FINISHED])
    stream = AsyncClient("127.0.0.1:1", channel=Channel(call)).stream(user("Hello"))
    taken: list[list[int]] = []

    def take(deltas: list[Delta]) -> bool:
        taken.append([one.seq for one in deltas])
        return len(taken) != 2

    assert not await stream.run(take)
    assert taken == first
    assert await stream.run(take)
    assert taken == first + rest
    assert stream.state.completion().text == "t0t1t2t3"


@pytest.mark.parametrize("kind", [Call, AioCall])
async def test_a_run_of_a_stream_without_its_end_raises(kind: type[Call | AioCall]) -> None:
    call = kind([STARTED, delta(0)])
    stream = AsyncClient("127.0.0.1:1", channel=Channel(call)).stream(user("Hello"))
    with pytest.raises(Internal) as caught:
        await stream.run(lambda deltas: True)
    assert caught.value.reason == "TRUNCATED_STREAM"
    assert call.is_cancelled
