"""Callers of a metrics port, each with a thread of its own: limits on their number and on work without credentials."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

# Seconds of work that callers without credentials may save up while quiet.
_SAVED_SECONDS = 0.25
# Work of a network in the last seconds that is little: of a prober, even of several.
_LITTLE_SECONDS = 0.01
# Share of a network's past work that still counts against it after a second.
_REMEMBERED = 0.5
# Most networks with remembered work.
_MOST_NETWORKS = 1024


@dataclass(slots=True)
class _MetricsCaller:
    """One connection."""

    network: str
    hang_up: Callable[[], None]
    has_asked: bool = False
    is_trusted: bool = False


class MetricsCallers:
    """Callers of one metrics port. Thread-safe.

    A new caller finds a place while another one has sent no whole request: the oldest such of the network with the most
    of them goes, so a flood displaces itself. Neither silent connections nor many requests shut out a probe from
    another network.
    """

    def __init__(self, most: int, share: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Make it for at most `most` callers. Those without credentials get `share` of a processor together; beyond it,
        networks that asked for work lately are turned away. None: nobody needs credentials."""
        self._most, self._share, self._clock = most, share, clock
        self._lock = threading.Lock()
        # From the oldest.
        self._callers: dict[Hashable, _MetricsCaller] = {}
        # Seconds of work left, refilled by `share` a second.
        self._left, self._filled_at = _SAVED_SECONDS, clock()
        # Network -> seconds of its work, less of it when it is older, and the time of that figure.
        self._work: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def enter(self, connection: Hashable, network: str, hang_up: Callable[[], None]) -> bool:
        """Take a place, before a thread is begun; `hang_up` is called if another caller needs it. False: there is
        none."""
        with self._lock:
            oldest = None
            if self._is_beyond_share(network):
                return False
            if len(self._callers) >= self._most:
                oldest = self._take_place()
                if oldest is None:
                    return False
            self._callers[connection] = _MetricsCaller(network, hang_up)
        if oldest is not None:
            oldest.hang_up()
        return True

    def ask(self, connection: Hashable, *, is_trusted: bool) -> None:
        """Note that its request is whole: it keeps its place. The work for one that is trusted is not counted."""
        with self._lock:
            caller = self._callers.get(connection)
            if caller is not None:
                caller.has_asked, caller.is_trusted = True, is_trusted

    def leave(self, connection: Hashable, network: str, seconds: float) -> None:
        """Give its place back, if it still has it, and count the work for it."""
        with self._lock:
            caller = self._callers.pop(connection, None)
            if self._share is None or (caller is not None and caller.is_trusted):
                return
            now = self._fill()
            # Later callers do not pay for a flood that has ended.
            self._left = max(-_SAVED_SECONDS, self._left - seconds)
            self._work[network] = (self._work_of(network, now) + seconds, now)
            self._work.move_to_end(network)
            if len(self._work) > _MOST_NETWORKS:
                self._work.popitem(last=False)

    def _take_place(self) -> _MetricsCaller | None:
        """Forget a caller without a whole request, and return it; None: there is none."""
        silent = {key: caller for key, caller in self._callers.items() if not caller.has_asked}
        if not silent:
            return None
        ((network, _),) = Counter(caller.network for caller in silent.values()).most_common(1)
        return self._callers.pop(next(key for key, caller in silent.items() if caller.network == network))

    def _is_beyond_share(self, network: str) -> bool:
        if self._share is None:
            return False
        now = self._fill()
        return self._left <= 0 and self._work_of(network, now) > _LITTLE_SECONDS

    def _fill(self) -> float:
        now = self._clock()
        self._left = min(_SAVED_SECONDS, self._left + (now - self._filled_at) * (self._share or 0.0))
        self._filled_at = now
        return now

    def _work_of(self, network: str, now: float) -> float:
        work, at = self._work.get(network, (0.0, now))
        return float(work * _REMEMBERED ** (now - at))
