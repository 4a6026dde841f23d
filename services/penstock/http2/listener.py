"""Listening socket that survives a lack of file descriptors: it waits instead of retrying and logging endlessly."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from asyncio import sslproto
from collections.abc import Callable
from typing import Any

from penstock.common.logging import get_logger
from penstock.http2.metered_tls import MeteredTls
from penstock.http2.strangers import network_of_peer

# Connections that may wait to be accepted; with asyncio's 100, further ones would come a second later.
_BACKLOG = 1024
# Connections accepted in one turn of the event loop, since live streams need their turn, too.
_PER_TURN = 16
# The same in seconds, for protocols that begin their work at once.
_TURN_SECONDS = 0.0005
# First and longest wait for descriptors or memory; waits double up to this.
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0
# Bytes that a TLS connection reads at once: one record.
_TLS_READ_BYTES = 16 << 10
# Shortest time between two log lines about a lack of descriptors.
_LOG_SECONDS = 10.0
_LACKS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_log = get_logger("penstock.http2")


def let_go(transport: Any) -> None:
    """Break the reference cycle of a lost asyncio transport: else only a garbage collection frees it, a kilobyte
    each."""
    if getattr(transport, "_read_ready_cb", None) is not None:
        transport._read_ready_cb = None


def _read_first(tls: Any) -> None:
    """Read what came with a connection, which mostly is the begin of its handshake: asyncio would a turn later."""
    own = getattr(getattr(tls, "_ssl_protocol", None), "_transport", None)
    if own is not None and hasattr(own, "_read_ready"):
        own._read_ready()


class Listener:
    """One socket and the connections that it accepts. Belongs to one event loop.

    Without free descriptors asyncio's own server retries a backlog's worth of times, and logs each.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        handshake_seconds: float,
        most_handshakes: int,
        most_handshakes_each: int | None = None,
        begins_at_once: bool = False,
    ) -> None:
        """Make it from a bound socket, which it owns from now on.

        `handshake_seconds`: time for TLS. With more than `most_handshakes` at once the oldest is given up; with more
        than `most_handshakes_each` from one network (`network_of`; None: no limit), the oldest of that network.
        `begins_at_once`: without TLS, protocols are told of their connection in the turn that accepts it, and again by
        asyncio in the next one.
        """
        self._socket = sock
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshake_seconds = handshake_seconds if tls is not None else None
        self._loop = asyncio.get_running_loop()
        # asyncio's own servers call the same, from a task: it adds turns of the loop to the way to the first byte.
        self._begin_plain = getattr(self._loop, "_make_socket_transport", None) if tls is None else None
        self._begin_tls = getattr(self._loop, "_make_ssl_transport", None) if tls is not None else None
        self._begins_at_once = begins_at_once
        self._most_handshakes = most_handshakes
        self._most_handshakes_each = most_handshakes if most_handshakes_each is None else most_handshakes_each
        # The ends of handshakes, with their networks and what gives them up, and those of each network; the oldest
        # first.
        self._opening: dict[asyncio.Future[None], tuple[str, Callable[[], object]]] = {}
        self._opening_of: dict[str, dict[asyncio.Future[None], None]] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._wait = _FIRST_WAIT
        self._told_at = -_LOG_SECONDS

    @staticmethod
    async def bind(
        host: str,
        port: int,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        handshake_seconds: float,
        most_handshakes: int,
        *,
        most_handshakes_each: int | None = None,
        shares_port: bool = False,
        begins_at_once: bool = False,
    ) -> tuple[list[Listener], int]:
        """Bind all addresses of a host; return a listener for each, and the port. Raises OSError.

        `shares_port`: other processes may bind it too.
        """
        if tls is not None:
            # For each connection from its first byte on; asyncio takes 256 KiB, sixteen times the largest record.
            sslproto.SSLProtocol.max_size = _TLS_READ_BYTES
            tls.sslobject_class = MeteredTls
        loop, host = asyncio.get_running_loop(), host.strip("[]")
        where: dict[str, Any] = {"host": host, "port": port, "reuse_port": shares_port or None}
        if host == "::" and socket.has_dualstack_ipv6():
            # With IPv4, like grpc; asyncio would take only IPv6.
            kind: dict[str, Any] = {"family": socket.AF_INET6, "dualstack_ipv6": True}
            where = {"sock": socket.create_server((host, port), reuse_port=shares_port, **kind)}
        # asyncio finds the addresses and binds the sockets; it never listens on them itself.
        server = await loop.create_server(make_protocol, start_serving=False, **where)
        bounds = (handshake_seconds, most_handshakes, most_handshakes_each, begins_at_once)
        made = [Listener(one.dup(), make_protocol, tls, *bounds) for one in server.sockets]
        bound = int(server.sockets[0].getsockname()[1])
        server.close()
        return made, bound

    def start(self) -> None:
        """Accept connections."""
        self._socket.setblocking(False)
        self._socket.listen(_BACKLOG)
        self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Accept no more."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _accept(self) -> None:
        # At most the number of handshakes: those that make room are from earlier turns, so their tasks have begun.
        until = time.perf_counter() + _TURN_SECONDS
        for number in range(min(_PER_TURN, self._most_handshakes, self._most_handshakes_each)):
            if number and time.perf_counter() > until:
                # The socket is ready in the next turn, too.
                return
            try:
                connection, peer = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _LACKS:
                    raise
                self._pause(error)
                return
            self._wait = _FIRST_WAIT
            connection.setblocking(False)
            if self._begin_plain is not None:
                with contextlib.suppress(OSError):
                    protocol = self._make_protocol()
                    transport = self._begin_plain(connection, protocol)
                    if self._begins_at_once:
                        protocol.connection_made(transport)
                continue
            network = network_of_peer(peer) if self._tls is not None else ""
            if self._begin_tls is not None:
                with contextlib.suppress(OSError):
                    self._open_tls(connection, network)
                continue
            task = self._loop.create_task(self._open(connection))
            self._note_opening(task, network, task.cancel)

    def _note_opening(self, end: asyncio.Future[None], network: str, give_up: Callable[[], object]) -> None:
        mates = self._opening_of.setdefault(network, {})
        self._opening[end] = network, give_up
        mates[end] = None
        end.add_done_callback(self._opened)
        if self._tls is None:
            return
        if len(mates) > self._most_handshakes_each:
            self._give_up(next(iter(mates)))
        elif len(self._opening) > self._most_handshakes:
            self._give_up(next(iter(self._opening)))

    def _give_up(self, oldest: asyncio.Future[None]) -> None:
        _, give_up = self._opening[oldest]
        self._forget(oldest)
        give_up()

    def _open_tls(self, connection: socket.socket, network: str) -> None:
        end: asyncio.Future[None] = self._loop.create_future()
        begin: Any = self._begin_tls
        transport = begin(
            connection,
            self._make_protocol(),
            self._tls,
            end,
            server_side=True,
            ssl_handshake_timeout=self._handshake_seconds,
        )
        self._note_opening(end, network, transport.abort)
        # Behind the turn's calls of asyncio that begin the handshake.
        self._loop.call_soon(_read_first, transport)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._tls, ssl_handshake_timeout=self._handshake_seconds
            )
        except (OSError, TimeoutError) as error:
            # A peer that hangs up during the TLS handshake is not an error. Its traceback leads back to it, with all of
            # the connection (35 KiB): only a garbage collection would free that, and nothing the hole in the heap.
            error.__traceback__ = None

    def _opened(self, end: asyncio.Future[None]) -> None:
        self._forget(end)
        if not end.cancelled() and (error := end.exception()) is not None:
            # See `_open`.
            error.__traceback__ = None

    def _forget(self, end: asyncio.Future[None]) -> None:
        network, _ = self._opening.pop(end, ("", None))
        if (mates := self._opening_of.get(network)) is None or end not in mates:
            return
        del mates[end]
        if not mates:
            del self._opening_of[network]

    def _pause(self, error: OSError) -> None:
        """Leave connections in the backlog for a while: accepting fails until a descriptor is closed."""
        self._loop.remove_reader(self._socket)
        self._retry = self._loop.call_later(self._wait, self._resume)
        self._wait = min(2 * self._wait, _LONGEST_WAIT)
        now = time.monotonic()
        if now - self._told_at >= _LOG_SECONDS:
            self._told_at = now
            _log.warning("connections wait: they cannot be accepted", cause=error.strerror, hint="raise ulimit -n")

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._socket, self._accept)
