"""Ejection of backends that fail more than others, and their way back; the habits are those of Envoy and gRPC's A50.

A backend is ejected after failures in a row, for a share of failures in a window far above that of its peers, or at
once when it breaks the protocol. The ejection lasts twice as long each time, with jitter. Then it is half open: one
request at a time is sent there as a probe. A probe has a deadline, so a lost one never keeps the backend out of turn.
"""

from __future__ import annotations

import enum
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.common.errors import Internal, PenstockError, Unavailable
from penstock.common.logging import get_logger

_log = get_logger("penstock.router")
# Parts of the window, so that old figures leave it one by one.
_PARTS = 10
_JITTER = 0.2


class Outcome(enum.Enum):
    """End or beginning of an attempt, as far as it tells about the backend."""

    # Taken, and finished as promised.
    STARTED = "started"
    FINISHED = "finished"
    # Refused; ended by an error of the service; lost with its connection; the protocol was broken.
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"
    LOST = "lost"
    PROTOCOL = "protocol"
    # Given up by the caller, or refused for the request's own sake: it says nothing.
    NEUTRAL = "neutral"


def outcome_of(error: PenstockError) -> Outcome:
    """Tell what an error says about the backend that answered with it: that of a request itself says nothing."""
    if error.reason == "DRAIN_GRACE_OVER":
        # Its operator drained it, and moved what was left.
        return Outcome.NEUTRAL
    if isinstance(error, Unavailable):
        return Outcome.LOST if error.reason == "BACKEND_LOST" else Outcome.UNAVAILABLE
    return Outcome.INTERNAL if isinstance(error, Internal) else Outcome.NEUTRAL


FAILURES = (Outcome.UNAVAILABLE, Outcome.INTERNAL, Outcome.LOST, Outcome.PROTOCOL)


@dataclass(frozen=True, slots=True)
class OutlierConfig:
    """Limits; router/config.py explains them and has the defaults."""

    consecutive: int
    share: float
    min_requests: int
    window_seconds: float
    seconds: float
    max_seconds: float
    max_share: float
    probe_seconds: float
    probes: int


@dataclass(slots=True)
class Probe:
    """Request on its way to a half-open backend."""

    deadline: float
    has_begun: bool = False


@dataclass(slots=True)
class _Part:
    begin: float
    attempts: int = 0
    failures: int = 0


@dataclass(slots=True)
class _Record:
    """Figures of one backend."""

    parts: deque[_Part] = field(default_factory=deque)
    in_a_row: int = 0
    # time.monotonic() at which it is half open; None: it is in use.
    ejected_until: float | None = None
    # Ejections; it forgets one for each longest ejection of good conduct.
    times: int = 0
    back_at: float = 0.0
    probe: Probe | None = None
    passed: int = 0
    # Of the ejection, and True once it was ended before its time.
    cause: str = ""
    is_early: bool = False


class Outliers:
    """Figures and ejections of all backends, by key. Belongs to one event loop."""

    def __init__(
        self,
        config: OutlierConfig,
        peers: Callable[[str], Sequence[str]],
        on_change: Callable[[str, str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Make it.

        `peers` returns the keys of ready backends that could stand in for one, itself included. `on_change` is called
        with a key and the cause of its ejection, or "" when it is back. `jitter` returns numbers in [0, 1).
        """
        self._config = config
        self._peers = peers
        self._on_change = on_change
        self._clock = clock
        self._jitter = jitter
        self._records: dict[str, _Record] = {}

    def is_ejected(self, key: str) -> bool:
        """True while requests are kept from a backend; a half-open one is ejected, too."""
        record = self._records.get(key)
        return record is not None and record.ejected_until is not None

    def wants_probe(self, key: str) -> bool:
        """True when an ejected backend may be sent one request now."""
        record, now = self._records.get(key), self._clock()
        if record is None or record.ejected_until is None:
            return False
        if record.probe is not None and now >= record.probe.deadline:
            # Lost: neither its end nor its client's came. One that has begun was taken, and is merely long.
            self._end_probe(key, record, Outcome.FINISHED if record.probe.has_begun else Outcome.LOST)
        return record.probe is None and record.ejected_until is not None and now >= record.ejected_until

    def begin_probe(self, key: str) -> Probe:
        """Return the probe that the request about to be sent there is. `wants_probe` holds."""
        record = self._records[key]
        record.probe = Probe(self._clock() + self._config.probe_seconds)
        return record.probe

    def note(self, key: str, outcome: Outcome, probe: Probe | None = None, *, has_begun: bool = False) -> None:
        """Count an outcome of an attempt; `probe`: it was that one. `has_begun`: its STARTED was counted before."""
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = _Record()
        if record.ejected_until is not None:
            # What was sent before the ejection says nothing new.
            if probe is not None and probe is record.probe:
                if outcome is Outcome.STARTED:
                    probe.has_begun = True
                else:
                    self._end_probe(key, record, outcome)
            return
        if outcome is Outcome.STARTED:
            record.in_a_row = 0
            self._part(record).attempts += 1
        elif outcome in FAILURES:
            self._failed(key, record, outcome, has_begun=has_begun)

    def half_open(self, key: str) -> None:
        """Let a backend with a connection that is back, or ready again, be probed at once: once, until it is in use.

        Those alone that were lost, or refused, in a row: a liar is the same after a reconnection.
        """
        record = self._records.get(key)
        if record is None or record.ejected_until is None or record.cause != "consecutive" or record.is_early:
            return
        record.is_early = True
        record.ejected_until = min(record.ejected_until, self._clock())

    def forget(self, key: str) -> None:
        """Forget a backend that is gone, or has another process: it is not ejected any more."""
        record = self._records.pop(key, None)
        if record is not None and record.ejected_until is not None:
            self._on_change(key, "")

    def _failed(self, key: str, record: _Record, outcome: Outcome, *, has_begun: bool) -> None:
        part = self._part(record)
        part.failures += 1
        part.attempts += not has_begun
        if outcome is not Outcome.INTERNAL:
            # A request may be what breaks a step: such errors count only against those of the peers.
            record.in_a_row += 1
        config = self._config
        if outcome is Outcome.PROTOCOL:
            self._eject(key, record, "protocol")
        elif config.consecutive and record.in_a_row >= config.consecutive:
            self._eject(key, record, "consecutive")
        elif config.share and self._stands_out(key, record):
            self._eject(key, record, "share")

    def _stands_out(self, key: str, record: _Record) -> bool:
        attempts, failures = self._sums(record)
        if attempts < self._config.min_requests:
            return False
        others = [self._sums(self._records[one]) for one in self._peers(key) if one != key and one in self._records]
        all_attempts = sum(one for one, _ in others)
        usual = sum(one for _, one in others) / all_attempts if all_attempts else 0.0
        return failures / attempts >= usual + self._config.share

    def _eject(self, key: str, record: _Record, cause: str) -> None:
        peers = self._peers(key)
        out = sum(self.is_ejected(one) for one in peers if one != key)
        most = max(1, int(self._config.max_share * len(peers)))
        # The last one stays, whatever it does: a bad answer may come from it, no answer comes from none.
        if key not in peers or out + 1 > most or out + 1 >= len(peers):
            return
        now = self._clock()
        if record.times and record.back_at:
            record.times = max(0, record.times - int((now - record.back_at) / self._config.max_seconds))
        record.cause = cause
        self._shut(record, now)
        _log.warning("backend ejected", backend=key, cause=cause, seconds=round(record.ejected_until - now, 3))  # type: ignore[operator]
        self._on_change(key, cause)

    def _shut(self, record: _Record, now: float) -> None:
        config = self._config
        seconds = min(config.seconds * 2.0 ** min(record.times, 32), config.max_seconds)
        record.ejected_until = now + seconds * (1 - _JITTER + 2 * _JITTER * self._jitter())
        record.times += 1
        record.passed, record.in_a_row, record.probe = 0, 0, None
        record.parts.clear()

    def _end_probe(self, key: str, record: _Record, outcome: Outcome) -> None:
        record.probe = None
        if outcome is Outcome.FINISHED:
            record.passed += 1
            if record.passed >= self._config.probes:
                record.ejected_until, record.back_at, record.is_early = None, self._clock(), False
                _log.info("backend back in use", backend=key)
                self._on_change(key, "")
        elif outcome in FAILURES:
            self._shut(record, self._clock())
            self._on_change(key, "probe")

    def _part(self, record: _Record) -> _Part:
        now = self._clock()
        self._drop_old(record, now)
        if not record.parts or now - record.parts[-1].begin >= self._config.window_seconds / _PARTS:
            record.parts.append(_Part(now))
        return record.parts[-1]

    def _sums(self, record: _Record) -> tuple[int, int]:
        """Return attempts and failures in the window."""
        self._drop_old(record, self._clock())
        return sum(part.attempts for part in record.parts), sum(part.failures for part in record.parts)

    def _drop_old(self, record: _Record, now: float) -> None:
        while record.parts and now - record.parts[0].begin > self._config.window_seconds:
            record.parts.popleft()
