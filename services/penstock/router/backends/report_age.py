"""Age of a backend's load report when it arrives here, without a clock that both share."""

from __future__ import annotations

# Clocks of two machines drift apart, by at most so much in a second. An age is at most so long.
_DRIFT, MOST_SECONDS = 1e-4, 0.25


class ReportAge:
    """Compares how long reports took with the quickest one. Belongs to one event loop.

    A backend's clock and ours begin anywhere. The least difference between a report's arrival here and its time there
    is that of a report that came at once; what others have more is their age. (A clock filter as in NTP, RFC 5905,
    section 10.)
    """

    def __init__(self) -> None:
        self._least: float | None = None
        self._noted_at = 0.0

    def of(self, measured_at: float, now: float) -> float:
        """Return the seconds since figures were measured, at least; 0 where `measured_at` is 0: it is not told."""
        if not measured_at:
            return 0.0
        offset = now - measured_at
        if self._least is None:
            self._least = offset
        else:
            self._least = min(self._least + _DRIFT * (now - self._noted_at), offset)
        self._noted_at = now
        return min(offset - self._least, MOST_SECONDS)
