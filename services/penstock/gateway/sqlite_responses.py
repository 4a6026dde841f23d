"""Responses of one gateway: rows of SQLite, in memory or in a file."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.gateway.response_store import StoredResponse, check_fits, encode_response
from penstock.gateway.sqlite_place import SqlitePlace

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
        self.place = SqlitePlace(place, _SCHEMA)
        self._db = self.place.db
        try:
            self.num_responses, self.num_bytes = self._db.execute(
                "SELECT count(*), coalesce(sum(size), 0) FROM responses"
            ).fetchone()
        except sqlite3.Error as error:
            raise self.place.refusal(error) from error

    async def open(self) -> None:
        """See ResponseStore: the file is already open."""

    async def close(self) -> None:
        """See ResponseStore."""
        await self.place.close()

    async def put(self, caller: str, stored: StoredResponse, previous: str | None) -> None:
        """See ResponseStore. A full disk is a StoreFailed."""
        await self.place.run(lambda: self._put(caller, stored, previous))

    async def replace(self, caller: str, stored: StoredResponse, previous: str | None) -> bool:
        """See ResponseStore. A full disk is a StoreFailed."""
        return await self.place.run(lambda: self._replace(caller, stored))

    async def get(self, caller: str, response_id: str) -> StoredResponse | None:
        """See ResponseStore."""
        return await self.place.run(lambda: self._get(caller, response_id)[0])

    async def chain(self, caller: str, response_id: str, max_bytes: int) -> list[StoredResponse] | None:
        """See ResponseStore."""
        return await self.place.run(lambda: self._chain(caller, response_id, max_bytes))

    async def delete(self, caller: str, response_id: str) -> bool:
        """See ResponseStore."""
        return await self.place.run(lambda: self._delete(caller, response_id))

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
            self._make_room()

    def _replace(self, caller: str, stored: StoredResponse) -> bool:
        given, response = encode_response(stored)
        size = len(given) + len(response)
        check_fits(size, self._max_bytes)
        with self._transaction():
            row = self._db.execute(
                "SELECT size FROM responses WHERE id = ? AND caller = ?", (stored.response_id, caller)
            ).fetchone()
            if row is None:
                return False
            self._db.execute(
                "UPDATE responses SET size = ?, input = ?, response = ? WHERE id = ?",
                (size, given, response, stored.response_id),
            )
            self.num_bytes += size - row[0]
            self._make_room()
        return True

    def _make_room(self) -> None:
        """Delete the oldest rows until the limits are met."""
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
        return bool(self.num_responses < before)
