"""Accepted connections up to the end of their TLS handshakes: no more begin in a turn than others can wait for."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from asyncio import sslproto
from collections.abc import Callable
from typing import Any

from penstock.http2.handshake_pace import HandshakePace
from penstock.http2.metered_tls import meter_handshakes

# Bytes that a TLS connection reads at once: one record.
_TLS_READ_BYTES = 16 << 10
# What asyncio does for a handshake; OpenSSL's part is measured.
_OPENING_SECONDS = 0.0004
# Work for the rest of a handshake.
_ENDING_SECONDS = 0.0003
# A network that is beyond its pace waits no longer for a handshake: some of its callers are no part of a flood.
_MOST_HELD_SECONDS = 0.2


class _Arrival:
    """A connection without a finished handshake."""

    __slots__ = ("connection", "due", "end", "network", "timer", "transport", "until")

    def __init__(self, connection: socket.socket, network: str, end: asyncio.Future[None], until: float) -> None:
        self.connection, self.network = connection, network
        # Done with its handshake; cancelled where none was begun.
        self.end = end
        # Time of the event loop at which it is given up, and the timer of that until its handshake begins.
        self.until = until
        self.timer: asyncio.TimerHandle | None = None
        # Time of the event loop by which it begins, once there are bytes, whatever the pace of its network.
        self.due = 0.0
        # Once its handshake has begun.
        self.transport: Any = None


class _ServerTls(sslproto.SSLProtocol):
    """asyncio's TLS of a connection that is told of its transport at once, and again by asyncio a turn later."""

    def connection_made(self, transport: Any) -> None:
        """Begin the handshake."""
        if self._transport is None and not self._conn_lost:  # type: ignore[attr-defined]
            super().connection_made(transport)


class TlsArrivals:
    """Connections of one listener without a finished handshake. Belongs to one event loop.

    A handshake takes a millisecond of the processor, most of it for the first bytes. So it begins once there are bytes,
    which are answered in the same turn of the loop, and one begins in a turn: of each network in rotation, so a flood
    delays itself. A silent connection has its socket alone.
    """

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext,
        seconds: float,
        most: int,
        most_each: int,
        on_work: Callable[[float], None],
        pace: HandshakePace | None = None,
    ) -> None:
        """Make it. `seconds`: of a handshake, from the connection on.

        With more than `most` at once the oldest is given up; with more than `most_each` from one network
        (`strangers.network_of`), the oldest of that network. `on_work` is told the seconds of processor time that
        handshakes take, as they do. `pace` (None: none) holds up those of a network, by a
        fifth of a second at most.
        """
        self._make_protocol, self._tls, self._seconds = make_protocol, tls, seconds
        self._most, self._most_each = most, most_each
        self._on_work, self._pace = on_work, pace
        # The next look at networks that are held up.
        self._held_up: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        # asyncio's own servers call the same, from a task: it adds turns of the loop to the way to the first byte.
        self._make_transport = getattr(self._loop, "_make_socket_transport", None)
        # All of them, and those of each network; the oldest first.
        self._all: dict[_Arrival, None] = {}
        self._of_network: dict[str, dict[_Arrival, None]] = {}
        # Those that have sent something, by network; the network whose turn is next comes first.
        self._waiting: dict[str, dict[_Arrival, None]] = {}
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
        if self._held_up is not None:
            self._held_up.cancel()
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
            self._wait(arrival)
        elif delay := self._delay(arrival.network):
            self._wait(arrival)
            self._arm(min(delay, _MOST_HELD_SECONDS))
        else:
            self._begin_turn(arrival)
        return True

    def _begin_turn(self, arrival: _Arrival) -> None:
        self._is_turn_taken = True
        self._loop.call_soon(self._next)
        began = time.thread_time()
        try:
            self._begin(arrival)
        except OSError:
            self._give_up(arrival)
        if self._pace is not None:
            self._pace.charge(arrival.network, time.thread_time() - began + _ENDING_SECONDS)

    def _wait(self, arrival: _Arrival) -> None:
        arrival.due = self._loop.time() + _MOST_HELD_SECONDS
        self._waiting.setdefault(arrival.network, {})[arrival] = None

    def _arm(self, delay: float) -> None:
        """Look at those that wait in so many seconds, if not before."""
        when = self._loop.time() + delay
        if self._held_up is not None:
            if self._held_up.when() <= when:
                return
            self._held_up.cancel()
        self._held_up = self._loop.call_at(when, self._next)

    def _delay(self, network: str) -> float:
        return 0.0 if self._pace is None else self._pace.delay(network)

    def _next(self) -> None:
        self._is_turn_taken = False
        if self._held_up is not None:
            self._held_up.cancel()
            self._held_up = None
        first = _MOST_HELD_SECONDS
        for network in list(self._waiting):
            arrival = next(iter(self._waiting[network]))
            if (delay := min(self._delay(network), arrival.due - self._loop.time())) > 0:
                first = min(first, delay)
                continue
            mates = self._waiting.pop(network)
            del mates[arrival]
            if mates:
                # Behind the other networks.
                self._waiting[network] = mates
            self._begin_turn(arrival)
            return
        if self._waiting:
            self._arm(first)

    def _begin(self, arrival: _Arrival) -> None:
        if arrival.timer is not None:
            arrival.timer.cancel()
            arrival.timer = None
        self._on_work(_OPENING_SECONDS)
        seconds = max(0.001, arrival.until - self._loop.time())
        if self._make_transport is None:
            arrival.transport = self._loop.create_task(self._open(arrival, seconds))
            return
        tls = _ServerTls(
            self._loop,
            self._make_protocol(),
            self._tls,
            arrival.end,
            server_side=True,
            ssl_handshake_timeout=seconds,  # type: ignore[arg-type]
        )
        arrival.transport = self._make_transport(arrival.connection, tls)
        tls.connection_made(arrival.transport)
        if hasattr(arrival.transport, "_read_ready"):
            arrival.transport._read_ready()

    async def _open(self, arrival: _Arrival, seconds: float) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, arrival.connection, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except (OSError, TimeoutError) as error:
            # A peer that hangs up during the handshake is not an error; see `_ended`.
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
        # A peer that hangs up during the handshake is not an error. The traceback leads back to it, with all of the
        # connection (35 KiB): only a garbage collection would free that, and nothing the hole in the heap.
        del arrival.end
        if not end.cancelled() and (error := end.exception()) is not None:
            error.__traceback__ = None

    def _forget(self, arrival: _Arrival) -> None:
        if arrival.timer is not None:
            arrival.timer.cancel()
            arrival.timer = None
        self._all.pop(arrival, None)
        for among in (self._of_network, self._waiting):
            mates = among.get(arrival.network, {})
            mates.pop(arrival, None)
            if not mates:
                among.pop(arrival.network, None)


def prepare(tls: ssl.SSLContext, on_work: Callable[[float], None]) -> None:
    """Let connections of a context hold no more than a record each, and tell what they cost; `on_work`: as above."""
    # For each connection from its first byte on; asyncio takes 256 KiB, sixteen times the largest record.
    sslproto.SSLProtocol.max_size = _TLS_READ_BYTES
    meter_handshakes(tls, on_work)
    # A quarter of OpenSSL's work for a handshake; whoever comes back pays a whole one, of as many round trips.
    tls.num_tickets = 0
