"""One end of an HTTP/2 connection as bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from penstock.common.http2 import frames


class Socket(asyncio.Transport):
    """Whose other end reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.unread = 0
        self.is_read = True
        self.is_closed = self.is_aborted = False

    def write(self, data: Any) -> None:
        self.written += data
        self.unread += len(data)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True


def frames_of(written: bytes | bytearray) -> Iterator[tuple[int, int, int, bytes]]:
    """Kind, flags, stream and payload of each frame."""
    data = bytes(written)
    while data:
        end = frames.FRAME_HEAD + int.from_bytes(data[:3], "big")
        yield data[3], data[4], int.from_bytes(data[5:9], "big"), data[frames.FRAME_HEAD : end]
        data = data[end:]


def message(data: bytes, *, compressed: bool = False) -> bytes:
    """A gRPC message with its head."""
    return bytes((compressed,)) + len(data).to_bytes(4, "big") + data
