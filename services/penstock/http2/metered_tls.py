"""TLS of a connection that tells what its reading costs: a record of one byte costs as much as one of many."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any

# Most received bytes that wait to be decrypted while nothing is read: all of them are in one turn of the event loop.
# asyncio's 256 KiB are twenty milliseconds of records of one byte.
_HELD_BYTES = 16 << 10


class MeteredTls(ssl.SSLObject):
    """End of a connection's TLS. asyncio reads it until there is nothing more; this is the time of one such reading,
    with all that OpenSSL does in it, as for updates of keys, which no protocol above ever sees."""

    # Called at the end of each reading with its seconds of processor time; None: nobody asks.
    on_read: Callable[[float], None] | None = None
    _began: float | None = None
    # The same of each part of a handshake, and the sum of them.
    on_handshake: Callable[[float], None] | None = None
    handshake_seconds = 0.0

    def do_handshake(self) -> None:
        """Go on with it."""
        if self.on_handshake is None:
            super().do_handshake()
            return
        began = time.thread_time()
        try:
            super().do_handshake()
        finally:
            seconds = time.thread_time() - began
            self.handshake_seconds += seconds
            self.on_handshake(seconds)

    def read(self, len: int = 1024, buffer: Any = None) -> Any:
        """Return decrypted bytes of one record."""
        if self.on_read is None:
            return super().read(len, buffer)
        if self._began is None:
            self._began = time.thread_time()
        found: Any = None
        try:
            found = super().read(len, buffer)
        finally:
            # SSLWantReadError, another error, or the end.
            if not found:
                seconds, self._began = time.thread_time() - self._began, None
                self.on_read(seconds)
        return found


def handshake_seconds(transport: asyncio.BaseTransport) -> float:
    """Return the seconds of processor time that a connection's handshake took in OpenSSL; 0 where nobody asked."""
    tls = transport.get_extra_info("ssl_object")
    return tls.handshake_seconds if isinstance(tls, MeteredTls) else 0.0


def meter(transport: asyncio.BaseTransport, on_read: Callable[[float], None]) -> None:
    """Tell `on_read` the seconds of each reading of a connection, and hold few of its bytes. Without TLS: nothing."""
    tls = transport.get_extra_info("ssl_object")
    if isinstance(tls, MeteredTls):
        tls.on_read = on_read
        _set_held_bytes(transport, _HELD_BYTES)


def stop_metering(transport: asyncio.BaseTransport | None) -> None:
    """Tell nobody any more, and hold as many bytes as asyncio does."""
    tls = None if transport is None else transport.get_extra_info("ssl_object")
    if isinstance(tls, MeteredTls) and tls.on_read is not None:
        tls.on_read = None
        _set_held_bytes(transport, None)


def _set_held_bytes(transport: Any, most: int | None) -> None:
    # Of asyncio's own transport of TLS alone.
    set_limits = getattr(transport, "set_read_buffer_limits", None)
    if set_limits is not None:
        set_limits(high=most)
