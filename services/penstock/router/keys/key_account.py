"""Use of a key by one request: from its place among the key's requests to its line in the ledger."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from types import TracebackType
from typing import Self

from penstock.common.errors import PenstockError, ResourceExhausted
from penstock.router.keys.api_key import ApiKey
from penstock.router.keys.key_metrics import KeyMetrics
from penstock.router.keys.key_rates import KeyRates, over_quota
from penstock.router.keys.ledger import Ledger
from penstock.router.keys.ledger_tables import DAY_SECONDS, AnswerEnd, Reservation, day_of

_DIGITS = 32


class KeyAccount:
    """Account of one request. A context manager: its end gives back what was not used, however the request ended.

    An answer is charged what was really generated, once: `finish` before the client sees its usage, or else the end of
    the block, with the figures of `note`.
    """

    __slots__ = ("_figures", "_key", "_ledger", "_metrics", "_model", "_rates", "_reservation", "_wait_seconds")

    def __init__(
        self, key: ApiKey, model: str, rates: KeyRates, ledger: Ledger, metrics: KeyMetrics, wait_seconds: float
    ) -> None:
        self._key, self._model, self._rates = key, model, rates
        self._ledger, self._metrics, self._wait_seconds = ledger, metrics, wait_seconds
        self._reservation: Reservation | None = None
        # Tokens of prompt and answers so far.
        self._figures = (0, 0)

    @property
    def tenant(self) -> str:
        """Tenant of the request."""
        return self._key.tenant_digest

    def __enter__(self) -> Self:
        """Count the request. Raises ResourceExhausted naming the quota."""
        try:
            self._rates.enter(self._key.quotas)
        except ResourceExhausted as error:
            self._refused(error)
            raise
        self._metrics.live(self._key.label).inc()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Count the end."""
        status = "OK"
        if isinstance(error, PenstockError):
            status = error.code.name
        elif error is not None:
            status = "CANCELLED" if isinstance(error, asyncio.CancelledError) else "INTERNAL"
        self._end(*self._figures, status)
        self._rates.leave()
        self._metrics.live(self._key.label).dec()
        self._metrics.requests(self._key.label, status).inc()

    async def reserve(self, prompt_tokens: int, output_tokens: int, request_id: str) -> None:
        """Take the most tokens that the request may use, before it is sent to a backend.

        Raises ResourceExhausted naming the quota that has fewer left, and Unavailable LEDGER_DOWN.
        """
        tokens, quotas, now = prompt_tokens + output_tokens, self._key.quotas, self._ledger.now
        asked = Reservation(
            entry=uuid.uuid4().hex,
            label=self._key.label,
            day=day_of(now),
            model=self._model,
            request=hashlib.sha256(request_id.encode()).hexdigest()[:_DIGITS],
            router=self._ledger.router,
            tokens=tokens,
            limit=quotas.tokens_per_day,
            began=now,
        )
        try:
            self._rates.take_tokens(quotas, tokens)
            try:
                left = await self._ledger.reserve(asked)
                if left is not None:
                    limit = quotas.tokens_per_day or 0
                    # Nobody waits until midnight where fewer tokens would do. More than a whole day's never fit.
                    wait = DAY_SECONDS - now % DAY_SECONDS if tokens <= limit else None
                    raise over_quota("tokens_per_day", limit, left, retry_after_seconds=wait, needed=tokens)
            except BaseException:
                self._rates.give_tokens(quotas, tokens)
                raise
        except ResourceExhausted as error:
            self._refused(error)
            raise
        self._reservation = asked

    def note(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Set the tokens so far, for a request that ends without `finish`."""
        self._figures = prompt_tokens, completion_tokens

    async def finish(self, prompt_tokens: int, completion_tokens: int, status: str = "OK") -> None:
        """Charge the answer, and return when the ledger has it, or does not answer in time: it keeps the charge."""
        written = self._end(prompt_tokens, completion_tokens, status)
        if written is not None:
            await asyncio.wait((written,), timeout=self._wait_seconds)

    def _end(self, prompt_tokens: int, completion_tokens: int, status: str) -> asyncio.Future[int | None] | None:
        asked, self._reservation = self._reservation, None
        if asked is None:
            return None
        self._rates.give_tokens(self._key.quotas, asked.tokens - prompt_tokens - completion_tokens)
        self._metrics.tokens(self._key.label, "prompt").inc(prompt_tokens)
        self._metrics.tokens(self._key.label, "completion").inc(completion_tokens)
        return self._ledger.end(
            AnswerEnd(
                entry=asked.entry,
                label=asked.label,
                day=asked.day,
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                status=status,
                ended=self._ledger.now,
            )
        )

    def _refused(self, error: ResourceExhausted) -> None:
        self._metrics.refusals(self._key.label, error.metadata.get("quota", "")).inc()
