"""Keepalive pings: they detect that the other end of a connection has silently gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class KeepAlive:
    """Pings a silent connection, and gives up one that does not answer. Belongs to one event loop."""

    def __init__(
        self, silence_seconds: float, timeout_seconds: float, ask: Callable[[], None], give_up: Callable[[], None]
    ) -> None:
        """Make it. `ask` sends a ping. The owner calls `note_activity` whenever anything arrives."""
        self._silence_seconds = silence_seconds
        self._timeout_seconds = timeout_seconds
        self._ask = ask
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._active_at = self._loop.time()
        self._is_asked = self._is_over = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._timer = self._loop.call_later(self._silence_seconds, self._look)

    def note_activity(self) -> None:
        """Note a sign of life."""
        self._active_at = self._loop.time()
        self._is_asked = False

    def stop(self) -> None:
        """Stop: the connection is over."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if self._is_asked:
            # Up to the second callback from here sockets are read on any loop: a pause of this process itself is not
            # taken for the peer's silence. On uvloop's a timer may come before them.
            self._loop.call_soon(self._loop.call_soon, self._look_last)
            return
        wait = self._silence_seconds - (self._loop.time() - self._active_at)
        if wait <= 0:
            self._is_asked, wait = True, self._timeout_seconds
            self._ask()
        self._timer = self._loop.call_later(wait, self._look)

    def _look_last(self) -> None:
        if self._is_asked and not self._is_over:
            self._give_up()
        elif not self._is_over:
            self._look()
