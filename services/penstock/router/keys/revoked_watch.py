"""Keys of a process that answers no calls and has no ledger of its own: it only looks for those that are revoked."""

from __future__ import annotations

import asyncio

from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.database.transactions import DatabaseFailed
from penstock.router.key_options import KeyOptions
from penstock.router.keys import ledger_tables as tables
from penstock.router.keys.key_ring import KeyRing
from penstock.router.keys.ledger import RENEWALS
from penstock.router.keys.ledger_database import open_ledger_database

_log = get_logger("penstock.router")


class RevokedWatch:
    """Follows what operators revoke at the routers that share a ledger. Belongs to one event loop."""

    def __init__(self, options: KeyOptions) -> None:
        """Read the file of keys; `open` opens the ledger. Raises StartupError naming the flag."""
        assert options.keys_file is not None
        self.ring = KeyRing(options.keys_file, options.max_keys)
        self._database = open_ledger_database(options)
        # As often as the routers look.
        self._interval = options.ledger_lease_seconds / RENEWALS
        self._is_failing = False

    async def open(self) -> None:
        """Open the ledger, and take what is revoked by now. Raises StartupError naming --ledger."""
        await self._database.open()
        try:
            await self._look()
        except DatabaseFailed as error:
            raise StartupError(f"--ledger: {error}", flag="--ledger") from error

    async def run(self) -> None:
        """Look again and again, until cancelled. A ledger that fails leaves what is known."""
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self._look()
            except DatabaseFailed as error:
                if not self._is_failing:
                    self._is_failing = True
                    _log.error("the ledger does not answer: keys revoked meanwhile read metrics", cause=str(error))
            else:
                self._is_failing = False

    async def close(self) -> None:
        """Close the ledger."""
        await self._database.close()

    async def _look(self) -> None:
        self.ring.revoke(await self._database.run(tables.revoked))
