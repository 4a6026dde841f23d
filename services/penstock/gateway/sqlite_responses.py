"""Responses of one gateway: rows of SQLite, in memory or in a file."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from penstock.common.errors import StartupError
from penstock.gateway.response_store import StoredResponse, StoreFailed, check_fits, encode_response

T = TypeVar("T")
MEMORY = "memory"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, caller TEXT NOT NULL, previous TEXT, expires REAL NOT NULL, size INTEGER NOT NULL,
    input BLOB NOT NULL, response BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS by_expiry ON responses (expires);
"""
# Order of age: all rows have the same lifetime.
_OLDEST = "SELECT id, size FROM responses ORDER BY expires, rowid LIMIT 16"


class SqliteResponses:
    """ResponseStore on SQLite. Its calls run on one thread, and may be awaited at once."""

    def __init__(self, place: str, *, max_responses: int, max_bytes: int, seconds: float) -> None:
        """Open the file at `place`, or keep all in memory. `seconds` is the life of a response.

        Raises StartupError naming the flag.
        """
        self._max_responses, self._max_bytes, self._seconds = max_responses, max_bytes, seconds
        self._thread = ThreadPoolExecutor(1, "response-store")
        self._is_closed = False
        self.num_responses = self.num_bytes = 0
        try:
            self._db = self._open(place)
            self.num_responses, self.num_bytes = self._db.execute(
                "SELECT count(*), coalesce(sum(size), 0) FROM responses"
            ).fetchone()
        except (OSError, sqlite3.Error) as error:
            raise StartupError(f"--response-store {place}: {error}", flag="--response-store") from error

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
        db.executescript(_SCHEMA)
        return db

    async def open(self) -> None:
        """See ResponseStore: the file is already open."""

    async def close(self) -> None:
        """See ResponseStore."""
        if not self._is_closed:
            self._is_closed = True
            await self._run(self._db.close)
            self._thread.shutdown(wait=False)

    async def put(self, caller: str, stored: StoredResponse, previous: str | None) -> None:
        """See ResponseStore. A full disk is a StoreFailed."""
        await self._run(lambda: self._put(caller, stored, previous))

    async def get(self, caller: str, response_id: str) -> StoredResponse | None:
        """See ResponseStore."""
        return await self._run(lambda: self._get(caller, response_id)[0])

    async def chain(self, caller: str, response_id: str, max_bytes: int) -> list[StoredResponse] | None:
        """See ResponseStore."""
        return await self._run(lambda: self._chain(caller, response_id, max_bytes))

    async def delete(self, caller: str, response_id: str) -> bool:
        """See ResponseStore."""
        return await self._run(lambda: self._delete(caller, response_id))

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise StoreFailed(str(error)) from error

    def _put(self, caller: str, stored: StoredResponse, previous: str | None) -> None:
        given, response = encode_response(stored)
        now, size = time.time(), len(given) + len(response)
        check_fits(size, self._max_bytes)
        with self._transaction():
            self._remove("SELECT id, size FROM responses WHERE expires < ?", now)
            self._db.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
                (stored.response_id, caller, previous, now + self._seconds, size, given, response),
            )
            self.num_responses += 1
            self.num_bytes += size
            while self.num_responses > self._max_responses or self.num_bytes > self._max_bytes:
                self._remove(_OLDEST, enough=True)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Change rows and counts together, or neither: the disk may fill up at any statement, or at the commit."""
        before = self.num_responses, self.num_bytes
        try:
            with self._db:
                yield
        except BaseException:
            self.num_responses, self.num_bytes = before
            raise

    def _remove(self, query: str, *values: Any, enough: bool = False) -> None:
        """Delete the rows that a query finds; with `enough` only until the limits are met."""
        for row_id, size in self._db.execute(query, values).fetchall():
            if enough and self.num_responses <= self._max_responses and self.num_bytes <= self._max_bytes:
                return
            self._db.execute("DELETE FROM responses WHERE id = ?", (row_id,))
            self.num_responses -= 1
            self.num_bytes -= size

    def _get(self, caller: str, response_id: str) -> tuple[StoredResponse | None, str | None, int]:
        row = self._db.execute(
            "SELECT input, response, previous, size FROM responses WHERE id = ? AND caller = ? AND expires >= ?",
            (response_id, caller, time.time()),
        ).fetchone()
        if row is None:
            return None, None, 0
        return StoredResponse(json.loads(row[1]), json.loads(row[0])), row[2], row[3]

    def _chain(self, caller: str, response_id: str, max_bytes: int) -> list[StoredResponse] | None:
        found: list[StoredResponse] = []
        at: str | None = response_id
        while at is not None:
            stored, at, size = self._get(caller, at)
            if stored is None:
                return None
            max_bytes -= size
            if max_bytes < 0:
                raise OverflowError
            found.append(stored)
        return found[::-1]

    def _delete(self, caller: str, response_id: str) -> bool:
        before = self.num_responses
        with self._transaction():
            self._remove("SELECT id, size FROM responses WHERE id = ? AND caller = ?", response_id, caller)
        return self.num_responses < before
