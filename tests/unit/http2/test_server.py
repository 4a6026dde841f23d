"""The server of the asyncio transport: what it holds amid a call, and its end."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import grpc
from factories.wire.http2 import LIMITS, Socket
from penstock.http2.limits import ServerLimits
from penstock.http2.server import Http2Server

SERVER_LIMITS = ServerLimits(max_calls=10, max_probes=10, request_bytes=1 << 20, max_strangers=10, strangers_share=0.1)


async def test_a_connection_whose_handshake_ends_after_the_server_stopped_is_closed() -> None:
    server, before, after = Http2Server(LIMITS, SERVER_LIMITS), Socket(), Socket()
    server._make_connection().connection_made(before)
    late = server._make_connection()
    assert not before.is_closed
    await server.stop(0)
    assert before.is_closed
    late.connection_made(after)
    assert after.is_closed


async def test_the_bytes_of_a_request_are_let_go_once_it_is_parsed() -> None:
    class Body:
        """Bytes of a request that can be watched."""

    held: list[bool] = []

    def parse(body: Any) -> weakref.ref[Any]:
        return weakref.ref(body)

    async def behavior(body: weakref.ref[Any], _: Any) -> None:
        held.append(body() is not None)

    async def request() -> Body:
        return Body()

    handler = grpc.unary_stream_rpc_method_handler(behavior, request_deserializer=parse)
    call: Any = SimpleNamespace(handler=handler, request=request, finish=lambda *_: None, code=int, details=str)
    await Http2Server(LIMITS, SERVER_LIMITS)._handle(call)
    assert held == [False]
