"""Pace of TLS handshakes: connections of one network that show no credentials begin no more than their share."""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds of work that a network may save up while quiet: some fifty handshakes at once.
_SAVED_SECONDS = 0.05
# Networks with work that counts still; beyond it those without any are forgotten, then the oldest.
_MOST_NETWORKS = 1024


class HandshakePace:
    """Work for the handshakes of each network that no credentials have followed. Belongs to one event loop.

    Handshakes come before everything that tells callers apart but their address. Without a pace, ten connections that
    end and come again take a fifth of a processor by their handshakes, and as much by what follows them.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Make it: handshakes of a network get `share` of a processor together."""
        self._share, self._clock = share, clock
        # Seconds of work that count against a network, and the time of that figure.
        self._work: dict[str, tuple[float, float]] = {}

    def delay(self, network: str) -> float:
        """Return the seconds until the next handshake of a network may begin; 0 for at once."""
        return max(0.0, (self._now(network) - _SAVED_SECONDS) / self._share)

    def charge(self, network: str, seconds: float) -> None:
        """Count work for a network."""
        if len(self._work) >= _MOST_NETWORKS and network not in self._work:
            self._work = {one: entry for one, entry in self._work.items() if self._now(one) > 0}
            while len(self._work) >= _MOST_NETWORKS:
                del self._work[next(iter(self._work))]
        self._work[network] = self._now(network) + seconds, self._clock()

    def forgive(self, network: str, seconds: float) -> None:
        """Give back the work for a connection of a network that has shown credentials."""
        if network in self._work:
            self._work[network] = max(0.0, self._now(network) - seconds), self._clock()

    def _now(self, network: str) -> float:
        work, at = self._work.get(network, (0.0, 0.0))
        return max(0.0, work - (self._clock() - at) * self._share)
