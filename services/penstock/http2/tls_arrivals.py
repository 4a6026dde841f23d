"""Accepted connections up to the end of their TLS handshakes: no more begin in a turn than others can wait for."""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio import sslproto
from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.http2.metered_tls import MeteredTls

# Bytes that a TLS connection reads at once: one record.
_TLS_READ_BYTES = 16 << 10


class _Arrival:
    """A connection without a finished handshake."""

    __slots__ = ("connection", "end", "network", "timer", "transport", "until")

    def __init__(self, connection: socket.socket, network: str, end: asyncio.Future[None], until: float) -> None:
        self.connection, self.network = connection, network
        # Done with its handshake; cancelled where none was begun.
        self.end = end
        # Time of the event loop at which it is given up, and the timer of that until its handshake begins.
        self.until = until
        self.timer: asyncio.TimerHandle | None = None
        # Once its handshake has begun.
        self.transport: Any = None


class TlsArrivals:
    """Connections of one listener without a finished handshake. Belongs to one event loop.

    A handshake takes a millisecond of the processor, most of it for the first bytes. So it begins once there are bytes,
    and one begins in a turn of the loop: of each network in rotation, so a flood delays itself. A silent connection has
    its socket alone.
    """

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext,
        seconds: float,
        most: int,
        most_each: int,
    ) -> None:
        """Make it. `seconds`: of a handshake, from the connection on.

        With more than `most` at once the oldest is given up; with more than `most_each` from one network
        (`strangers.network_of`), the oldest of that network.
        """
        self._make_protocol, self._tls, self._seconds = make_protocol, tls, seconds
        self._most, self._most_each = most, most_each
        self._loop = asyncio.get_running_loop()
        # asyncio's own servers call the same, from a task: it adds turns of the loop to the way to the first byte.
        self._make_transport = getattr(self._loop, "_make_ssl_transport", None)
        # All of them, and those of each network; the oldest first.
        self._all: dict[_Arrival, None] = {}
        self._of_network: dict[str, dict[_Arrival, None]] = {}
        # Those that have sent something, by network; the network whose turn is next comes first.
        self._waiting: dict[str, deque[_Arrival]] = {}
        # One has begun in this turn of the loop.
        self._is_turn_taken = False

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: socket.socket, network: str) -> None:
        """Take an accepted connection; others may have to give way."""
        until = self._loop.time() + self._seconds
        arrival = _Arrival(connection, network, self._loop.create_future(), until)
        self._all[arrival] = None
        mates = self._of_network.setdefault(network, {})
        mates[arrival] = None
        arrival.end.add_done_callback(lambda end: self._ended(arrival))
        if len(mates) > self._most_each:
            self._give_up(next(iter(mates)))
        elif len(self._all) > self._most:
            self._give_up(next(iter(self._all)))
        arrival.timer = self._loop.call_at(until, self._give_up, arrival)
        if not self._has_come(arrival):
            self._loop.add_reader(connection, self._hear, arrival)

    def close(self) -> None:
        """Let go those whose handshake has not begun."""
        for arrival in [one for one in self._all if one.transport is None]:
            self._give_up(arrival)

    def _hear(self, arrival: _Arrival) -> None:
        self._loop.remove_reader(arrival.connection)
        if not self._has_come(arrival):
            self._loop.add_reader(arrival.connection, self._hear, arrival)

    def _has_come(self, arrival: _Arrival) -> bool:
        """Return whether its first bytes or its end have come; then its turn will come, or it is gone."""
        try:
            is_there = bool(arrival.connection.recv(1, socket.MSG_PEEK))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            is_there = False
        if not is_there:
            self._give_up(arrival)
        elif self._is_turn_taken:
            self._waiting.setdefault(arrival.network, deque()).append(arrival)
        else:
            self._begin_turn(arrival)
        return True

    def _begin_turn(self, arrival: _Arrival) -> None:
        self._is_turn_taken = True
        self._loop.call_soon(self._next)
        try:
            self._begin(arrival)
        except OSError:
            self._give_up(arrival)

    def _next(self) -> None:
        self._is_turn_taken = False
        while self._waiting:
            network = next(iter(self._waiting))
            mates = self._waiting.pop(network)
            arrival = mates.popleft()
            if mates:
                # Behind the other networks.
                self._waiting[network] = mates
            if not arrival.end.done():
                self._begin_turn(arrival)
                return

    def _begin(self, arrival: _Arrival) -> None:
        if arrival.timer is not None:
            arrival.timer.cancel()
            arrival.timer = None
        seconds = max(0.001, arrival.until - self._loop.time())
        if self._make_transport is None:
            arrival.transport = self._loop.create_task(self._open(arrival, seconds))
            return
        arrival.transport = self._make_transport(
            arrival.connection,
            self._make_protocol(),
            self._tls,
            arrival.end,
            server_side=True,
            ssl_handshake_timeout=seconds,
        )
        # Behind the turn's calls of asyncio that begin the handshake.
        self._loop.call_soon(_read_first, arrival.transport)

    async def _open(self, arrival: _Arrival, seconds: float) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, arrival.connection, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except (OSError, TimeoutError) as error:
            # See `_ended`.
            error.__traceback__ = None
        finally:
            if not arrival.end.done():
                arrival.end.cancel()

    def _give_up(self, arrival: _Arrival) -> None:
        self._forget(arrival)
        if isinstance(arrival.transport, asyncio.Task):
            arrival.transport.cancel()
        elif arrival.transport is not None:
            arrival.transport.abort()
        else:
            self._loop.remove_reader(arrival.connection)
            arrival.connection.close()
            arrival.end.cancel()

    def _ended(self, arrival: _Arrival) -> None:
        self._forget(arrival)
        end = arrival.end
        if not end.cancelled() and (error := end.exception()) is not None:
            # A peer that hangs up during the TLS handshake is not an error. Its traceback leads back to it, with all of
            # the connection (35 KiB): only a garbage collection would free that, and nothing the hole in the heap.
            error.__traceback__ = None

    def _forget(self, arrival: _Arrival) -> None:
        if arrival.timer is not None:
            arrival.timer.cancel()
            arrival.timer = None
        if arrival not in self._all:
            return
        del self._all[arrival]
        mates = self._of_network[arrival.network]
        del mates[arrival]
        if not mates:
            del self._of_network[arrival.network]


def prepare(tls: ssl.SSLContext) -> None:
    """Let connections of a context tell what they cost, and hold no more than a record each."""
    # For each connection from its first byte on; asyncio takes 256 KiB, sixteen times the largest record.
    sslproto.SSLProtocol.max_size = _TLS_READ_BYTES
    tls.sslobject_class = MeteredTls


def _read_first(tls: Any) -> None:
    """Read what came with a connection, which mostly is the begin of its handshake: asyncio would a turn later."""
    own = getattr(getattr(tls, "_ssl_protocol", None), "_transport", None)
    if own is not None and hasattr(own, "_read_ready"):
        own._read_ready()
