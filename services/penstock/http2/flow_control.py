"""Flow control of a server's connection: what the client lets us send, what we let it send, and the calls that wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.http2 import frames
from penstock.http2.limits import Limits
from penstock.http2.request_bytes import RequestBytes


class WindowedCall(Protocol):
    """A call, as flow control sees it."""

    # Bytes that the client lets us send on its stream, and those of the message that a write waits with.
    window: int
    wants: int

    def wake(self) -> None:
        """Let a write that waits try again: there may be room now."""


class FlowControl:
    """Windows of one connection. Its calls count what they send themselves. Belongs to one event loop."""

    # Of the calls' path: attributes of slots are found fastest.
    __slots__ = (
        "_give_back_from",
        "_most_at_once",
        "_owed",
        "_send",
        "blocked",
        "has_new_room",
        "initial_window",
        "is_paused",
        "request_bytes",
        "window",
    )

    def __init__(self, limits: Limits, request_bytes: RequestBytes | None, send: Callable[[bytes], None]) -> None:
        """Make it. `request_bytes`: the process's budget; `send` queues bytes for the client."""
        # Bytes that the client lets us send on the connection, and on a new stream.
        self.window = self.initial_window = frames.DEFAULT_WINDOW
        # True while the client does not read the connection fast enough.
        self.is_paused = False
        # Calls that wait for room on the connection, by stream; those that wait for their stream's are not among them.
        self.blocked: dict[int, WindowedCall] = {}
        # Bytes of requests that the connection may hold.
        self.request_bytes = RequestBytes(limits.connection_window_bytes, request_bytes)
        self._send = send
        self._most_at_once = limits.write_buffer_bytes
        # Bytes of the connection's window that were not given back to the client yet, and how many are sent together.
        self._owed, self._give_back_from = 0, limits.connection_window_bytes // 4
        # True when a frame made room for calls that wait: they are woken once, however many frames come together.
        self.has_new_room = False

    def take_data(self, size: int) -> None:
        """Count a DATA frame of `size` bytes against the connection's window.

        It is given back whatever happens to the call, for many frames at once: a call that is behind holds back its own
        stream's window.
        """
        self._owed += size
        if self._owed >= self._give_back_from:
            self._send(frames.window_update(0, self._owed))
            self._owed = 0

    def take_update(self, more: int) -> None:
        """Take a WINDOW_UPDATE of the connection; `pass_on_new_room` wakes who waits. Raises Violation."""
        self.window += more
        if not more:
            raise frames.Violation(frames.PROTOCOL_ERROR, "no more window")
        if self.window > frames.MAX_WINDOW:
            raise frames.Violation(frames.FLOW_CONTROL_ERROR, "the window is wrong")
        self.has_new_room = True

    def resize(self, windows: list[int], calls: Iterable[WindowedCall]) -> None:
        """Set the first window of streams to the last of `windows`, by way of all of them. Raises Violation."""
        initial = windows[-1]
        change, beyond = initial - self.initial_window, frames.MAX_WINDOW - (max(windows) - self.initial_window)
        self.initial_window = initial
        for call in calls:
            if call.window > beyond:
                raise frames.Violation(frames.FLOW_CONTROL_ERROR, "the window is wrong")
            call.window += change
            if 0 < call.window <= change:
                call.wake()

    def pass_on_new_room(self) -> None:
        """Let calls try again for which frames made room."""
        self.has_new_room = False
        self.pass_on()

    def pass_on(self) -> None:
        """Let calls that wait for room try again, as many as there is room for."""
        if not self.blocked or self.is_paused:
            return
        room = min(self.window, self._most_at_once)
        for call in self.blocked.values():
            if room <= 0:
                return
            room -= max(1, min(call.wants, call.window))
            call.wake()
