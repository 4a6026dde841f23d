"""Account of one request: what it is told when its key has too little left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from penstock.common.errors import ResourceExhausted
from penstock.database.sqlite_database import SqliteDatabase
from penstock.database.transactions import TEMPORARY
from penstock.router.keys.api_key import ApiKey, KeyQuotas
from penstock.router.keys.key_account import KeyAccount
from penstock.router.keys.key_metrics import KeyMetrics
from penstock.router.keys.key_rates import KeyRates, over_quota
from penstock.router.keys.ledger import Ledger
from penstock.router.keys.ledger_tables import DAY_SECONDS, SCHEMA
from prometheus_client import CollectorRegistry

# An hour before midnight.
NOW = 20_000 * DAY_SECONDS - 3600.0


@asynccontextmanager
async def account_of(**quotas: int) -> AsyncIterator[KeyAccount]:
    """Make the account of a request with such a key."""
    database = SqliteDatabase(TEMPORARY, "ledger.sqlite", "--ledger", SCHEMA)
    ledger = Ledger(database, lease_seconds=60.0, entry_days=35, max_waiting=64, clock=lambda: NOW)
    await ledger.open(lambda _: None)
    running = asyncio.create_task(ledger.run())
    key = ApiKey(label="a", digests=(), tenant="a", quotas=KeyQuotas(**quotas))
    try:
        yield KeyAccount(key, "model", KeyRates(), ledger, KeyMetrics(CollectorRegistry()), 60.0)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await database.close()


async def test_what_a_day_has_no_more_waits_until_midnight() -> None:
    async with account_of(tokens_per_day=100) as account:
        await account.reserve(10, 50, "first")
        with pytest.raises(ResourceExhausted, match=r"40 are left.*, or wait") as caught:
            await account.reserve(10, 50, "second")
    assert caught.value.retry_after_seconds == 3600.0


async def test_what_no_day_has_does_not_wait_for_the_next() -> None:
    async with account_of(tokens_per_day=100) as account:
        with pytest.raises(ResourceExhausted, match=r"ask for fewer new tokens$") as caught:
            await account.reserve(10, 91, "request")
    assert caught.value.retry_after_seconds is None


def test_nobody_is_told_of_fewer_than_none() -> None:
    # The day's quota was made smaller than what it has used.
    error = over_quota("tokens_per_day", 5, -20, retry_after_seconds=1.0, needed=3)
    assert (error.metadata["remaining"], " 0 are left" in error.message) == ("0", True)
