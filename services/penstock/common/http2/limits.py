"""What one connection may hold and ask for."""

from __future__ import annotations

import time
from dataclasses import dataclass

from penstock.common.config import ServerConfig
from penstock.common.http2 import frames
from penstock.common.transport import MAX_METADATA_BYTES


@dataclass(frozen=True)
class Limits:
    """Of a server's connection."""

    max_message_bytes: int
    max_header_list_bytes: int
    max_streams: int
    keepalive_seconds: float
    keepalive_timeout_seconds: float
    min_ping_interval_seconds: float
    # What a client may have on its way: of one call, and of all.
    stream_window_bytes: int
    connection_window_bytes: int
    # Bytes of answers that may wait in the process for a connection that is not read.
    write_buffer_bytes: int
    # Frames that ask for work without doing any: how many at once, and how fast there may be more.
    idle_frames: int
    idle_frames_per_second: float

    @classmethod
    def of(cls, config: ServerConfig, *, max_streams: int) -> Limits:
        """As configured."""
        return cls(
            max_message_bytes=config.receive_limit_bytes,
            max_header_list_bytes=MAX_METADATA_BYTES,
            max_streams=max_streams,
            keepalive_seconds=config.keepalive_seconds,
            keepalive_timeout_seconds=config.keepalive_timeout_seconds,
            min_ping_interval_seconds=config.min_ping_interval_seconds,
            stream_window_bytes=config.stream_window_bytes,
            connection_window_bytes=config.connection_window_bytes,
            write_buffer_bytes=config.write_buffer_bytes,
            idle_frames=config.idle_frames,
            idle_frames_per_second=config.idle_frames_per_second,
        )


class IdleFrames:
    """The budget of frames that ask for work without doing any (resets, settings, priorities)."""

    def __init__(self, limits: Limits) -> None:
        self._most = float(limits.idle_frames)
        self._per_second = limits.idle_frames_per_second
        self._left = self._most
        self._filled_at = time.monotonic()

    def spend(self) -> None:
        """Raises Violation when there were too many."""
        now = time.monotonic()
        self.refund((now - self._filled_at) * self._per_second)
        self._filled_at = now
        self._left -= 1
        if self._left < 0:
            raise frames.Violation(frames.ENHANCE_YOUR_CALM, "too many frames that do nothing")

    def refund(self, count: float) -> None:
        """There is reason for `count` more."""
        self._left = min(self._most, self._left + count)
