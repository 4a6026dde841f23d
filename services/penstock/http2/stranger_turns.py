"""Turns of one connection that has shown no credentials: when its bytes are looked at, and the work that counts."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import grpc

from penstock.http2.server_call import Refused
from penstock.http2.strangers import SLICE_SECONDS, Strangers


class StrangerConnection(Protocol):
    """A connection, as its turns see it."""

    @property
    def is_busy(self) -> bool:
        """True while it has calls."""

    @property
    def is_open(self) -> bool:
        """True until it is closed, or lost."""

    @property
    def is_unread(self) -> bool:
        """True while too many answers wait: nothing more is read."""

    @property
    def has_hung_up(self) -> bool:
        """True when the other end has closed or reset it, whatever it sent before."""

    def work(self) -> None:
        """Handle the frames that have come: of a stranger `until` the end of its turn."""

    def set_reading(self, is_reading: bool) -> None:
        """Go on, or stop, reading bytes."""

    def evict(self) -> None:
        """Hang up: others need the place."""

    def abort(self) -> None:
        """Hang up at once."""


class StrangerTurns:
    """Turns of one connection among all strangers of its server. Implements strangers.Stranger."""

    __slots__ = (
        "_connection",
        "_goes_on",
        "_has_left",
        "_most_probes",
        "_strangers",
        "has_more",
        "network",
        "probes",
        "until",
        "work",
        "worked_at",
    )

    def __init__(self, connection: StrangerConnection, strangers: Strangers, most_probes: int) -> None:
        """Make it; `begin` makes the connection a stranger. `most_probes`: most of its calls at once."""
        self.work = self.worked_at = 0.0
        self.network = ""
        # Calls at once that need no credentials.
        self.probes = 0
        # time.perf_counter() at which the present turn is over.
        self.until = 0.0
        # True when whole frames were left for a later turn; and that one will come.
        self.has_more = self._goes_on = False
        # True once the connection is no stranger any more.
        self._has_left = False
        self._connection = connection
        self._strangers = strangers
        self._most_probes = most_probes

    def begin(self) -> None:
        """Join the strangers; where they are too many another one goes."""
        self._strangers.add(self)

    def end(self) -> None:
        """Leave them: a call was admitted by its credentials, or the connection is lost."""
        self._has_left = True
        self._strangers.discard(self)

    @property
    def are_many(self) -> bool:
        """True while all strangers ask for more than their share."""
        return self._strangers.are_many

    @property
    def is_busy(self) -> bool:
        """True while it has calls."""
        return self._connection.is_busy

    def evict(self) -> None:
        """Hang up: others need the place."""
        self._connection.evict()

    def add_probe(self, seconds: float) -> None:
        """Count a call that needs no credentials, and its work. Raises Refused when there are too many."""
        self._strangers.spend(self, seconds)
        if self.probes >= self._most_probes:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"a connection may have {self._most_probes} calls without credentials",
            )
        self.probes += 1

    def count_reading(self, seconds: float) -> None:
        """Count the reading of its TLS; beyond the strangers' share nothing more is read until its turn comes."""
        if self._has_left:
            return
        self._strangers.spend(self, seconds)
        if not self._goes_on and not self._strangers.may_go_on(self):
            self._goes_on = True
            self._connection.set_reading(False)

    def take_bytes(self) -> None:
        """Look at bytes that have come, or leave them for a later turn."""
        if self._goes_on:
            return
        self._goes_on = True
        if self._strangers.may_go_on(self):
            self._take_turn()
        else:
            self._connection.set_reading(False)

    def resume(self) -> None:
        """Go on after the client has read what waited for it."""
        if self._goes_on:
            return
        if self.has_more:
            self._goes_on = True
            asyncio.get_running_loop().call_soon(self.go_on)
        else:
            self._connection.set_reading(True)

    def go_on(self) -> None:
        """Look at the bytes that wait, for a slice of time; not at those of one that has hung up."""
        if self._connection.has_hung_up:
            # It is not read, so nobody would be told before all that it has sent had its turns.
            self._connection.abort()
        else:
            self._take_turn()

    def _take_turn(self) -> None:
        self._goes_on = False
        connection = self._connection
        if not connection.is_open:
            return
        begin = time.thread_time()
        self.until = time.perf_counter() + SLICE_SECONDS
        connection.work()
        if not self._has_left:
            self._strangers.spend(self, time.thread_time() - begin)
        if not connection.is_open:
            return
        if not self.has_more:
            if not connection.is_unread:
                connection.set_reading(True)
            return
        connection.set_reading(False)
        if not connection.is_unread:
            self._goes_on = True
            if self._strangers.may_go_on(self):
                asyncio.get_running_loop().call_soon(self.go_on)
