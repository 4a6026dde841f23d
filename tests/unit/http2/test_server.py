"""The server of the asyncio transport at its end."""

from __future__ import annotations

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
