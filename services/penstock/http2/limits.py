"""Limits on the memory and the work of one connection."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from penstock.http2 import frames

_PING_STRIKES = 3


@dataclass(frozen=True)
class Limits:
    """Limits of a server's connection."""

    max_message_bytes: int
    max_header_list_bytes: int
    # Calls at once.
    max_streams: int
    keepalive_seconds: float
    keepalive_timeout_seconds: float
    min_ping_interval_seconds: float
    # Bytes that a client may have in flight: in one stream of requests, and in all calls.
    stream_window_bytes: int
    connection_window_bytes: int
    # Seconds for the first bytes to arrive, and for the request of a call that needs no credentials.
    handshake_seconds: float
    # Seconds for the only request of any other call to arrive.
    request_seconds: float
    # Bytes of answers that may wait in the process for a client that does not read.
    write_buffer_bytes: int
    # Frames that cost work and carry no data: the most in a burst, and the further ones a second.
    idle_frames: int
    idle_frames_per_second: float
    # A reset counts as such a frame while its call is younger than this and unanswered.
    early_reset_seconds: float
    # Calls at once that need no credentials.
    max_probes: int


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server, over all connections."""

    # Calls at once, and further calls that need no credentials.
    max_calls: int
    max_probes: int
    # Bytes of requests that no handler has taken.
    request_bytes: int
    # Connections that have shown no credentials yet (and again this many in TLS handshakes), and their share of a
    # processor's time.
    max_strangers: int
    strangers_share: float


class ChannelLimits(Protocol):
    """Limits of a client's connections; any object with these three will do."""

    @property
    def max_message_bytes(self) -> int:
        """Largest message to receive."""

    @property
    def keepalive_seconds(self) -> float:
        """Seconds of silence before a ping."""

    @property
    def keepalive_timeout_seconds(self) -> float:
        """Seconds for a ping to be answered."""


class IdleFrames:
    """Budget of frames that cost work and carry no data (resets, settings, priorities)."""

    def __init__(self, limits: Limits) -> None:
        self._most = float(limits.idle_frames)
        self._per_second = limits.idle_frames_per_second
        self._left = self._most
        self._filled_at = time.monotonic()

    def spend(self, what: str = "frames that do nothing", *, count: int = 1) -> None:
        """Count `count` frames. Raises Violation, with the name `what`, when there were too many."""
        now = time.monotonic()
        self.refund((now - self._filled_at) * self._per_second)
        self._filled_at = now
        self._left -= count
        if self._left < 0:
            raise frames.Violation(frames.ENHANCE_YOUR_CALM, f"too many {what}")

    def refund(self, count: float) -> None:
        """Allow `count` more."""
        self._left = min(self._most, self._left + count)


class Pings:
    """Budget of a client's pings that come too often while nothing else happens."""

    def __init__(self, min_interval_seconds: float) -> None:
        self._min_interval_seconds = min_interval_seconds
        self._strikes = 0
        self._last = 0.0

    def take(self, *, is_idle: bool) -> None:
        """Count a ping. Raises Violation at the third that is too early. `is_idle`: nothing was sent since the last."""
        now = time.monotonic()
        if is_idle and now - self._last < self._min_interval_seconds:
            self._strikes += 1
            if self._strikes >= _PING_STRIKES:
                # grpc's own words, which make its clients ping less often.
                raise frames.Violation(frames.ENHANCE_YOUR_CALM, "too_many_pings")
        elif not is_idle:
            self._strikes = 0
        self._last = now
