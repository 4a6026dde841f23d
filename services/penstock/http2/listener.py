"""Listening socket that survives a lack of file descriptors: it waits instead of retrying and logging endlessly."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from penstock.common.logging import get_logger
from penstock.http2.handshake_pace import HandshakePace
from penstock.http2.strangers import network_of_peer
from penstock.http2.tls_arrivals import TlsArrivals, prepare

# Connections that may wait to be accepted; with asyncio's 100, further ones would come a second later.
_BACKLOG = 1024
# Connections accepted in one turn of the event loop, since live streams need their turn, too.
_PER_TURN = 16
# The same in seconds, for protocols that begin their work at once.
_TURN_SECONDS = 0.0005
# First and longest wait for descriptors or memory; waits double up to this.
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0
# Shortest time between two log lines about a lack of descriptors.
_LOG_SECONDS = 10.0
_LACKS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_log = get_logger("penstock.http2")


def let_go(transport: Any) -> None:
    """Break the reference cycle of a lost asyncio transport: else only a garbage collection frees it, a kilobyte
    each."""
    if getattr(transport, "_read_ready_cb", None) is not None:
        transport._read_ready_cb = None


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
        on_work: Callable[[float], None] = lambda seconds: None,
        pace: HandshakePace | None = None,
    ) -> None:
        """Make it from a bound socket, which it owns from now on.

        `handshake_seconds`: time for TLS. With more than `most_handshakes` at once the oldest is given up; with more
        than `most_handshakes_each` from one network (`network_of`; None: no limit), the oldest of that network.
        `begins_at_once`: without TLS, protocols are told of their connection in the turn that accepts it, and again by
        asyncio in the next one. `on_work` is told the seconds of processor time that handshakes take; `pace`
        holds up those of a network.
        """
        self._socket = sock
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        # asyncio's own servers call the same, from a task: it adds turns of the loop to the way to the first byte.
        self._begin_plain = getattr(self._loop, "_make_socket_transport", None)
        self._begins_at_once = begins_at_once
        most_each = most_handshakes if most_handshakes_each is None else most_handshakes_each
        self._arrivals: TlsArrivals | None = None
        if tls is not None:
            self._arrivals = TlsArrivals(
                make_protocol, tls, handshake_seconds, most_handshakes, most_each, on_work, pace
            )
        # Those that begin by tasks.
        self._opening: set[asyncio.Task[None]] = set()
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
        on_work: Callable[[float], None] = lambda seconds: None,
        pace: HandshakePace | None = None,
    ) -> tuple[list[Listener], int]:
        """Bind all addresses of a host; return a listener for each, and the port. Raises OSError.

        `shares_port`: other processes may bind it too.
        """
        if tls is not None:
            prepare(tls)
        loop, host = asyncio.get_running_loop(), host.strip("[]")
        if host == "::" and socket.has_dualstack_ipv6():
            # With IPv4, like grpc.
            both: dict[str, Any] = {"family": socket.AF_INET6, "dualstack_ipv6": True}
            sockets = [socket.create_server((host, port), reuse_port=shares_port, **both)]
        else:
            sockets = await _bound(loop, host, port, shares_port)
        bounds = (handshake_seconds, most_handshakes, most_handshakes_each, begins_at_once, on_work, pace)
        made = [Listener(one, make_protocol, tls, *bounds) for one in sockets]
        return made, int(sockets[0].getsockname()[1])

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
        if self._arrivals is not None:
            self._arrivals.close()

    @property
    def num_opening(self) -> int:
        """Number of connections without a finished handshake."""
        return len(self._opening) if self._arrivals is None else len(self._arrivals)

    def _accept(self) -> None:
        until = time.perf_counter() + _TURN_SECONDS
        for number in range(_PER_TURN):
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
            if self._arrivals is not None:
                self._arrivals.add(connection, network_of_peer(peer))
            elif self._begin_plain is not None:
                with contextlib.suppress(OSError):
                    protocol = self._make_protocol()
                    transport = self._begin_plain(connection, protocol)
                    if self._begins_at_once:
                        protocol.connection_made(transport)
            else:
                task = self._loop.create_task(self._open(connection))
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(self._make_protocol, connection)

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


async def _bound(loop: asyncio.AbstractEventLoop, host: str, port: int, shares_port: bool) -> list[socket.socket]:
    """Bind a socket at each address of a host that this machine has. Raises OSError, and then has bound none."""
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            one = socket.socket(family, kind, protocol)
        except OSError as error:
            # A family that the kernel was built, or started, without.
            absent = error
            continue
        sockets.append(one)
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_port:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
        except OSError:
            for bound in sockets:
                bound.close()
            raise
    if absent is not None and not sockets:
        raise absent
    return sockets
