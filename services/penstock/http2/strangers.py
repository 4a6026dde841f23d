"""Connections that have shown no credentials yet: limits on their number and on their work together."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

# Seconds of work for one stranger in a turn of the event loop, however much it has sent.
SLICE_SECONDS = 0.0005
# Approximate seconds of work for all strangers in a turn: all others wait for the turn's end.
_TURN_SECONDS = 0.0005
# Seconds of work that strangers may save up while quiet, or owe.
_SAVED_SECONDS = 0.05
# Negligible work of a stranger, in seconds.
_LITTLE_SECONDS = 0.0002
# Share of a stranger's past work that still counts against it after a second.
_REMEMBERED = 0.5
# Bytes of an IPv6 address that are assigned to a site; it chooses the others.
_SITE_BYTES = 8


class Stranger(Protocol):
    """A connection, for this module."""

    # Seconds of work that it has asked for, with less weight for older work, and the time of that figure.
    work: float
    worked_at: float
    # Its network, if the number of each network's connections is limited (`network_of`).
    network: str

    @property
    def is_busy(self) -> bool:
        """True while it has calls."""

    def evict(self) -> None:
        """Hang up: others need the place."""

    def go_on(self) -> None:
        """Handle the waiting bytes."""


def network_of(transport: asyncio.BaseTransport) -> str:
    """Return the address of the other end; for IPv6 the network of its site, which can use any address in it.

    Empty without an address.
    """
    return network_of_peer(transport.get_extra_info("peername"))


def network_of_peer(peer: object) -> str:
    """Return the same of a socket's other end."""
    host = str(peer[0]) if isinstance(peer, tuple) and peer else ""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return address.packed[:_SITE_BYTES].hex()


class Strangers:
    """Strangers of a server. Belongs to one event loop.

    While they ask for less than their share, nobody waits. Beyond it, those that asked for more than the others wait
    for their turns, so a probe among floods is answered at once.
    """

    def __init__(
        self,
        most: int,
        share: float,
        *,
        most_of_network: int | None = None,
        on_evicted: Callable[[], None] = lambda: None,
    ) -> None:
        """Make it for at most `most` connections, which together get `share` of a processor.

        `most_of_network`: the most from one network (`network_of`); None: no limit. `on_evicted` is called when one
        has made room for another.
        """
        self._most = most
        self._share = share
        self._most_of_network = most if most_of_network is None else most_of_network
        # From the oldest.
        self._all: dict[Stranger, None] = {}
        self._of_network: dict[str, dict[Stranger, None]] = {}
        self._on_evicted = on_evicted
        # Seconds of work left; refilled by `share` a second.
        self._left = _SAVED_SECONDS
        self._filled_at = time.monotonic()
        self._waiting: deque[Stranger] = deque()
        # Strangers that wait for the next turn of the event loop, and the rest of this turn.
        self._next_turn: deque[Stranger] = deque()
        self._turn_left, self._is_turn_noted = _TURN_SECONDS, False
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._all)

    @property
    def are_many(self) -> bool:
        """True while they ask for more than their share."""
        self._fill()
        return self._left <= 0

    def add(self, stranger: Stranger) -> None:
        """Add a new connection. When there are too many, one goes: the oldest without calls, else the oldest.

        When one network has too many, one of the same network goes: a flood displaces itself.
        """
        mates = self._of_network.get(stranger.network, {})
        if len(mates) >= self._most_of_network:
            self._evict(mates)
        elif len(self._all) >= self._most:
            self._evict(self._all)
        self._all[stranger] = None
        self._of_network.setdefault(stranger.network, {})[stranger] = None

    def evict_oldest(self) -> Stranger | None:
        """Make room for others: the oldest without calls goes, else the oldest; return it. None: there is none."""
        return self._evict(self._all) if self._all else None

    def _evict(self, among: Mapping[Stranger, None]) -> Stranger:
        oldest = next((one for one in among if not one.is_busy), next(iter(among)))
        # At once: its end may take a while, and the next new connection must not find it again.
        self.discard(oldest)
        self._on_evicted()
        oldest.evict()
        return oldest

    def discard(self, stranger: Stranger) -> None:
        """Forget a connection that has shown credentials, or is lost."""
        if stranger not in self._all:
            return
        del self._all[stranger]
        mates = self._of_network[stranger.network]
        del mates[stranger]
        if not mates:
            del self._of_network[stranger.network]

    def spend(self, stranger: Stranger, seconds: float) -> None:
        """Count work done for `stranger`."""
        now = self._fill()
        # Later connections must not pay for a flood that has ended.
        self._left = max(-_SAVED_SECONDS, self._left - seconds)
        self.charge(seconds)
        stranger.work = self._work_of(stranger, now) + seconds
        stranger.worked_at = now

    def charge(self, seconds: float) -> None:
        """Count work of this turn that no stranger is known for, that of a handshake: the others have later turns."""
        self._turn_left -= seconds
        self._note_turn()

    def may_go_on(self, stranger: Stranger) -> bool:
        """True when the bytes of `stranger` may be handled now; else its `go_on` is called once they may."""
        now = self._fill()
        work = self._work_of(stranger, now)
        # An equal part of the work of all within the time that work is remembered.
        part = max(_LITTLE_SECONDS, self._share / max(1, len(self._all)))
        if self._left <= 0 and work > part:
            self._waiting.append(stranger)
            self._arm()
            return False
        if self._turn_left <= 0 and work > _LITTLE_SECONDS:
            self._next_turn.append(stranger)
            return False
        return True

    def _note_turn(self) -> None:
        if not self._is_turn_noted:
            self._is_turn_noted = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        """Begin a turn of the event loop with the strangers that waited for it."""
        self._is_turn_noted, self._turn_left = False, _TURN_SECONDS
        try:
            while self._next_turn and self._turn_left > 0:
                self._next_turn.popleft().go_on()
        finally:
            # Even if one of them fails.
            if self._next_turn:
                self._note_turn()

    def _arm(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, -self._left / self._share), self._next)

    def _next(self) -> None:
        self._timer = None
        self._fill()
        try:
            # One at a time: the work of each delays the turn of the next.
            self._waiting.popleft().go_on()
        finally:
            self._arm()

    def _fill(self) -> float:
        now = time.monotonic()
        self._left = min(_SAVED_SECONDS, self._left + (now - self._filled_at) * self._share)
        self._filled_at = now
        return now

    def _work_of(self, stranger: Stranger, now: float) -> float:
        return float(stranger.work * _REMEMBERED ** (now - stranger.worked_at))
