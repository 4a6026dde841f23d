"""SQLite database of one gateway, in memory or in a file, and the one thread that works on it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from penstock.common.errors import StartupError
from penstock.database.transactions import DatabaseFailed
from penstock.database.work_thread import WorkThread
from penstock.gateway.response_store import MEMORY, StoreFailed

T = TypeVar("T")


class SqlitePlace:
    """A database that several stores share; each makes its own tables."""

    def __init__(self, place: str) -> None:
        """Open the file at `place`, or keep all in memory. Raises StartupError naming --response-store."""
        self._place = place
        self._thread = WorkThread("response-store")
        self._is_closed = False
        try:
            self.db = self._open(place)
        except (OSError, sqlite3.Error) as error:
            raise self.refusal(error) from error

    def add(self, schema: str) -> None:
        """Make tables. Raises StartupError naming --response-store."""
        try:
            self.db.executescript(schema)
        except sqlite3.Error as error:
            raise self.refusal(error) from error

    def refusal(self, why: Exception) -> StartupError:
        """Return the error of a place that cannot be used."""
        return StartupError(f"--response-store {self._place}: {why}", flag="--response-store")

    @staticmethod
    def _open(place: str) -> sqlite3.Connection:
        if place == MEMORY:
            path = ":memory:"
        else:
            file = Path(place).expanduser()
            path = str(file)
            # Conversations are private.
            os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        db = sqlite3.connect(path, check_same_thread=False, timeout=0.0)
        # A second gateway would make the counts wrong, so it is refused.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        # Deleted data is overwritten.
        db.execute("PRAGMA secure_delete = ON")
        return db

    async def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns on the thread. Raises StoreFailed for the database's errors, and after `close`."""
        try:
            return await self._thread.run(work)
        except (DatabaseFailed, sqlite3.Error) as error:
            raise StoreFailed(str(error)) from error

    async def close(self) -> None:
        """Close it. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            await self.run(self.db.close)
            self._thread.close()
