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
        self._is_asked = False
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
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        # Data that arrived meanwhile was noted first, since a turn of the loop reads sockets before it runs timers.
        # So a pause of this process itself is not taken for the peer's silence.
        if self._is_asked:
            self._give_up()
            return
        wait = self._silence_seconds - (self._loop.time() - self._active_at)
        if wait <= 0:
            self._is_asked, wait = True, self._timeout_seconds
            self._ask()
        self._timer = self._loop.call_later(wait, self._look)
