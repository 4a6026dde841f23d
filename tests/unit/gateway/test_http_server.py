"""Pieces of an answer, written without ASGI."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.gateway.http_server import HttpConnection


def test_a_piece_is_a_chunk_and_an_empty_one_does_not_end_the_answer() -> None:
    written: list[bytes] = []
    protocol: Any = object.__new__(HttpConnection)
    protocol.flow = SimpleNamespace(write_paused=False)
    protocol.is_closing = False
    protocol._own = SimpleNamespace(is_closing=lambda: False, write=written.append)
    assert protocol.write_piece(b"")
    assert protocol.write_piece(b"twelve bytes")
    assert written == [b"c\r\ntwelve bytes\r\n"]
    protocol.flow.write_paused = True
    assert not protocol.write_piece(b"more")
