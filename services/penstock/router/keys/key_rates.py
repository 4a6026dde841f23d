"""Rates and concurrent requests of the keys of one process: what their quotas leave at this moment."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.common.errors import ResourceExhausted
from penstock.router.keys.api_key import KeyQuotas

_MINUTE = 60.0


class _QuotaBucket:
    """Units that flow back within a minute."""

    __slots__ = ("at", "left")

    def __init__(self, limit: float, now: float) -> None:
        self.left, self.at = limit, now

    def fill(self, limit: float, now: float) -> float:
        """Return the units that there are now."""
        self.left = min(limit, self.left + (now - self.at) * limit / _MINUTE)
        self.at = now
        return self.left


class KeyRates:
    """Rates of one key. It outlives changes of the file, so that no change gives a key its units again.

    A rate of n a minute is a bucket of n units that fills by n a minute: after a quiet minute n may come at once.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: _QuotaBucket | None = None
        self._tokens: _QuotaBucket | None = None
        self.running = 0

    def enter(self, quotas: KeyQuotas) -> None:
        """Count a request, which is to `leave`. Raises ResourceExhausted naming the quota that is used up."""
        if quotas.concurrent_requests is not None and self.running >= quotas.concurrent_requests:
            # Nobody knows when a request ends.
            raise over_quota("concurrent_requests", quotas.concurrent_requests, 0, retry_after_seconds=1.0)
        limit = quotas.requests_per_minute
        if limit is not None:
            bucket, left = self._filled("_requests", limit)
            if left < 1.0:
                wait = (1.0 - left) * _MINUTE / limit
                raise over_quota("requests_per_minute", limit, 0, retry_after_seconds=wait)
            bucket.left -= 1.0
        self.running += 1

    def leave(self) -> None:
        """Give back the place among concurrent requests."""
        self.running -= 1

    def take_tokens(self, quotas: KeyQuotas, tokens: int) -> None:
        """Take the most tokens that a request may use. Raises ResourceExhausted naming the quota."""
        limit = quotas.tokens_per_minute
        if limit is None:
            return
        bucket, left = self._filled("_tokens", limit)
        if tokens > left:
            # More than the bucket ever has: no wait helps.
            wait = (tokens - left) * _MINUTE / limit if tokens <= limit else None
            raise over_quota("tokens_per_minute", limit, int(left), retry_after_seconds=wait, needed=tokens)
        bucket.left -= tokens

    def give_tokens(self, quotas: KeyQuotas, tokens: int) -> None:
        """Give back tokens that were taken and not used."""
        if quotas.tokens_per_minute is not None and self._tokens is not None:
            self._tokens.left += tokens

    def _filled(self, name: str, limit: int) -> tuple[_QuotaBucket, float]:
        now = self._clock()
        bucket: _QuotaBucket | None = getattr(self, name)
        if bucket is None:
            bucket = _QuotaBucket(limit, now)
            setattr(self, name, bucket)
        return bucket, bucket.fill(limit, now)


def over_quota(
    quota: str, limit: int, left: int, *, retry_after_seconds: float | None, needed: int | None = None
) -> ResourceExhausted:
    """Make the refusal of a request that a quota does not allow. `needed`: tokens that it may use."""
    # Below 0 where the quota was made smaller meanwhile.
    left = max(0, left)
    text = f"{quota} of this key is {limit}"
    if needed is None:
        text += ", and it is used up"
    else:
        advice = "" if retry_after_seconds is None else ", or wait"
        text += f", {left} are left, and this request may use {needed}: ask for fewer new tokens{advice}"
    metadata = {"quota": quota, "limit": str(limit), "remaining": str(left)}
    return ResourceExhausted(text, reason="QUOTA_EXCEEDED", metadata=metadata, retry_after_seconds=retry_after_seconds)
