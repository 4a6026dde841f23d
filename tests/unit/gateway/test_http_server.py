"""A connection: pieces of an answer, written without ASGI, and its end."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

from penstock.gateway.http_server import HttpConnection, _Transport


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


def test_a_connection_that_has_unparsed_bytes_is_not_read_on() -> None:
    """uvicorn asks for more of a body whatever waits: of chunks of 256,000 bytes a second one is past the bound."""
    resumed: list[bool] = []
    own: Any = SimpleNamespace(
        write=None, get_extra_info=None, pause_reading=None, resume_reading=lambda: resumed.append(True)
    )
    connection: Any = SimpleNamespace(abort=None, has_held_bytes=True)
    transport = _Transport(own, connection)
    transport.resume_reading()
    assert not resumed
    connection.has_held_bytes = False
    transport.resume_reading()
    assert resumed


def test_a_head_goes_out_with_the_begin_of_its_body() -> None:
    written: list[bytes] = []
    own: Any = SimpleNamespace(
        write=written.append, get_extra_info=None, pause_reading=None, resume_reading=None, is_closing=lambda: False
    )
    ended = {"is_closing": False, "is_lost": False, "has_held_bytes": False}
    connection: Any = SimpleNamespace(abort=None, close=lambda: written.append(b"closed"), **ended)
    transport = _Transport(own, connection)
    transport.hold_head()
    transport.write(b"head,")
    assert not written
    transport.write(b"body")
    transport.write(b"more")
    assert written == [b"head,body", b"more"]
    # An answer without a body.
    for end in (transport.release, transport.close):
        written.clear()
        transport.hold_head()
        transport.write(b"head")
        end()
        transport.write(b"next")
        assert [*written[:1], *written[-1:]] == [b"head", b"next"]


def test_a_connection_that_its_other_end_cut_off_is_closed_without_an_error() -> None:
    """The caller's reset comes before asyncio reads it: shutdown(2) says ENOTCONN then."""
    ended: list[str] = []

    def write_eof() -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    protocol: Any = object.__new__(HttpConnection)
    protocol.is_closing, protocol._is_within = False, True
    protocol._own = SimpleNamespace(
        can_write_eof=lambda: True, write_eof=write_eof, abort=lambda: ended.append("abort")
    )
    protocol.close()
    assert ended == ["abort"]
    assert protocol.is_closing
