"""Accepted connections up to the end of their TLS handshakes: no more begin in a turn than others can wait for."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import time
from asyncio import sslproto
from collections.abc import Callable
from typing import Any

from penstock.http2.handshake_pace import HandshakePace
from penstock.http2.metered_tls import MeteredTls

# Bytes that a TLS connection reads at once: one record.
_TLS_READ_BYTES = 16 << 10
# What asyncio does for a handshake, in seconds; OpenSSL's part is measured.
OPENING_SECONDS = 0.0004
# Once handshakes of a turn have taken so long, no further one begins in it; one takes about as long.
_TURN_SECONDS = 0.0005
# Bytes before a record's own, and the first of them in a handshake.
_HEAD_BYTES, _HANDSHAKE = 5, 0x16
# A network that is beyond its pace waits no longer for a handshake: some of its callers are no part of a flood.
_MOST_HELD_SECONDS = 0.2


class _Arrival:
    """A connection without a finished handshake."""

    __slots__ = ("connection", "due", "end", "needed", "network", "timer", "transport", "until")

    def __init__(self, connection: socket.socket, network: str, end: asyncio.Future[None], until: float) -> None:
        self.connection, self.network = connection, network
        # Done with its handshake; cancelled where none was begun.
        self.end = end
        # Time of the event loop at which it is given up, and the timer of that until its handshake begins.
        self.until = until
        self.timer: asyncio.TimerHandle | None = None
        # Time of the event loop from which on it waits for no pace, once its first record has come.
        self.due = 0.0
        # Bytes of its first record that the loop was asked to wait for.
        self.needed = 0
        # Once its handshake has begun.
        self.transport: Any = None


class _ServerTls(sslproto.SSLProtocol):
    """asyncio's TLS of a connection that is told of its transport at once, and again by asyncio a turn later."""

    def note_work(self, on_handshake: Callable[[float], None]) -> None:
        """Tell `on_handshake` the seconds of processor time of each part of the handshake."""
        tls: Any = self._sslobj  # type: ignore[attr-defined]
        if isinstance(tls, MeteredTls):
            tls.on_handshake = on_handshake

    def connection_made(self, transport: Any) -> None:
        """Begin the handshake."""
        if self._transport is None and not self._conn_lost:  # type: ignore[attr-defined]
            super().connection_made(transport)


class TlsArrivals:
    """Connections of one listener without a finished handshake. Belongs to one event loop.

    A handshake takes a millisecond of the processor, most of it for the first record. So it begins once that is whole,
    and answers it in the same turn of the loop; mostly one begins in a turn: of each network in rotation, so a flood
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
        handshakes take, as they do. `pace` (None: none) holds up those of a network.
        """
        self._make_protocol, self._tls, self._seconds = make_protocol, tls, seconds
        self._most, self._most_each = most, most_each
        self._on_work, self._pace = on_work, pace
        self._loop = asyncio.get_running_loop()
        # asyncio's own servers call the same, from a task: it adds turns of the loop to the way to the first byte.
        self._make_transport = getattr(self._loop, "_make_socket_transport", None)
        # All of them, and those of each network; the oldest first.
        self._all: dict[_Arrival, None] = {}
        self._of_network: dict[str, dict[_Arrival, None]] = {}
        # Those with a first record, by network; the network with the next turn comes first.
        self._waiting: dict[str, dict[_Arrival, None]] = {}
        # One has begun in this turn of the loop.
        self._is_turn_taken = False
        # The next look at those that are held up.
        self._held_up: asyncio.TimerHandle | None = None

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
        if arrival not in self._all:
            return
        arrival.timer = self._loop.call_at(until, self._give_up, arrival)
        if not self._has_come(arrival):
            self._loop.add_reader(connection, self._hear, arrival)

    def close(self) -> None:
        """Let go those without a handshake so far."""
        if self._held_up is not None:
            self._held_up.cancel()
        for arrival in [one for one in self._all if one.transport is None]:
            self._give_up(arrival)

    def _hear(self, arrival: _Arrival) -> None:
        self._loop.remove_reader(arrival.connection)
        if not self._has_come(arrival):
            self._loop.add_reader(arrival.connection, self._hear, arrival)

    def _has_come(self, arrival: _Arrival) -> bool:
        """Return whether its first record or its end has come; then its turn will come, or it is gone."""
        connection = arrival.connection
        try:
            found = connection.recv(_TLS_READ_BYTES, socket.MSG_PEEK)
            missing = _missing(found)
            # Else the other end has ended within it.
            if missing and len(found) >= arrival.needed:
                # The loop is told once they are there: who sends the costly bytes later would take no turn for them.
                arrival.needed = len(found) + missing
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, arrival.needed)
                return False
            if arrival.needed:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            found = b""
        if not found:
            self._give_up(arrival)
            return True
        delay = self._delay(arrival.network)
        if not (self._is_turn_taken or delay or arrival.network in self._waiting):
            self._begin_in_turn(arrival)
            return True
        # Behind those of its network that wait.
        arrival.due = self._loop.time() + _MOST_HELD_SECONDS
        self._waiting.setdefault(arrival.network, {})[arrival] = None
        if not self._is_turn_taken:
            self._arm(min(delay, _MOST_HELD_SECONDS))
        return True

    def _delay(self, network: str) -> float:
        return 0.0 if self._pace is None else self._pace.delay(network)

    def _arm(self, delay: float) -> None:
        """Look at those that wait after `delay` seconds, if not before."""
        when = self._loop.time() + delay
        if self._held_up is not None:
            if self._held_up.when() <= when:
                return
            self._held_up.cancel()
        self._held_up = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        """Begin with those that were held up; where one has begun in this turn, the next turn does."""
        self._held_up = None
        if not self._is_turn_taken:
            self._next()

    def _next(self) -> None:
        """Begin with those that have their turn."""
        self._is_turn_taken = False
        began = time.thread_time()
        while (arrival := self._pop()) is not None:
            self._begin_in_turn(arrival)
            if time.thread_time() - began >= _TURN_SECONDS:
                return

    def _pop(self) -> _Arrival | None:
        """Take the one that begins next; where all are held up, look again once one is not."""
        first = _MOST_HELD_SECONDS
        for network, mates in list(self._waiting.items()):
            arrival = next(iter(mates))
            if (delay := min(self._delay(network), arrival.due - self._loop.time())) > 0:
                first = min(first, delay)
                continue
            del self._waiting[network]
            del mates[arrival]
            if mates:
                # Behind the other networks.
                self._waiting[network] = mates
            return arrival
        if self._waiting:
            self._arm(first)
        return None

    def _begin_in_turn(self, arrival: _Arrival) -> None:
        if not self._is_turn_taken:
            self._is_turn_taken = True
            self._loop.call_soon(self._next)
        try:
            self._begin(arrival)
        except BaseException as error:
            self._give_up(arrival)
            if not isinstance(error, OSError):
                raise

    def _begin(self, arrival: _Arrival) -> None:
        if arrival.timer is not None:
            arrival.timer.cancel()
            arrival.timer = None
        self._count(arrival.network, OPENING_SECONDS)
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
        tls.note_work(functools.partial(self._count, arrival.network))
        arrival.transport = self._make_transport(arrival.connection, tls)
        tls.connection_made(arrival.transport)
        if hasattr(arrival.transport, "_read_ready"):
            arrival.transport._read_ready()

    def _count(self, network: str, seconds: float) -> None:
        self._on_work(seconds)
        if self._pace is not None:
            self._pace.charge(network, seconds)

    async def _open(self, arrival: _Arrival, seconds: float) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, arrival.connection, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except (OSError, TimeoutError) as error:
            # A peer that hangs up during the handshake is not an error; see `_ended`.
            error.__traceback__ = None
        finally:
            if arrival in self._all:
                arrival.end.cancel()

    def _give_up(self, arrival: _Arrival) -> None:
        self._forget(arrival)
        if isinstance(arrival.transport, asyncio.Task):
            arrival.transport.cancel()
        elif arrival.transport is not None:
            arrival.transport.abort()
        else:
            # Of a descriptor that asyncio took before it failed: RuntimeError.
            with contextlib.suppress(RuntimeError, ValueError):
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


def prepare(tls: ssl.SSLContext) -> None:
    """Let connections of a context hold no more than a record each, and tell what they cost."""
    # For each connection from its first byte on; asyncio takes 256 KiB, sixteen times the largest record.
    sslproto.SSLProtocol.max_size = _TLS_READ_BYTES
    tls.sslobject_class = MeteredTls
    # A quarter of OpenSSL's work for a handshake; whoever comes back pays a whole one, of as many round trips.
    tls.num_tickets = 0


def _missing(found: bytes) -> int:
    """Return the bytes that a first record lacks; 0 for a whole one, one too long to wait for, and no handshake."""
    if not found or found[0] != _HANDSHAKE:
        return 0
    if len(found) < _HEAD_BYTES:
        return _HEAD_BYTES - len(found)
    length = _HEAD_BYTES + int.from_bytes(found[3:5], "big")
    return length - len(found) if len(found) < length <= _TLS_READ_BYTES else 0
