"""Responses of one gateway: rows of SQLite, in memory or in a file."""

from __future__ import annotations

import json
import time

from penstock.gateway.bounded_rows import BoundedRows
from penstock.gateway.response_store import StoredResponse, check_fits, encode_response
from penstock.gateway.sqlite_place import SqlitePlace

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, caller TEXT NOT NULL, previous TEXT, expires REAL NOT NULL, size INTEGER NOT NULL,
    input BLOB NOT NULL, response BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS by_expiry ON responses (expires);
"""


class SqliteResponses:
    """ResponseStore on SQLite. Its calls run on one thread, and may be awaited at once."""

    def __init__(self, place: str, *, max_responses: int, max_bytes: int, seconds: float) -> None:
        """Open the file at `place`, or keep all in memory. `seconds` is the life of a response.

        Raises StartupError naming the flag.
        """
        self._max_bytes, self._seconds = max_bytes, seconds
        self.place = SqlitePlace(place)
        self._rows = BoundedRows(self.place, "responses", _SCHEMA, most=max_responses, most_bytes=max_bytes)

    @property
    def num_responses(self) -> int:
        return self._rows.count

    @property
    def num_bytes(self) -> int:
        return self._rows.num_bytes

    async def open(self) -> None:
        """The file is already open."""

    async def close(self) -> None:
        await self.place.close()

    async def put(self, caller: str, stored: StoredResponse, previous: str | None) -> None:
        """A full disk is a StoreFailed."""
        await self.place.run(lambda: self._put(caller, stored, previous))

    async def replace(self, caller: str, stored: StoredResponse, previous: str | None) -> bool:
        """A full disk is a StoreFailed."""
        return await self.place.run(lambda: self._replace(caller, stored))

    async def get(self, caller: str, response_id: str) -> StoredResponse | None:
        return await self.place.run(lambda: self._get(caller, response_id)[0])

    async def chain(self, caller: str, response_id: str, max_bytes: int) -> list[StoredResponse] | None:
        return await self.place.run(lambda: self._chain(caller, response_id, max_bytes))

    async def delete(self, caller: str, response_id: str) -> bool:
        return await self.place.run(lambda: self._rows.delete(caller, response_id))

    def _put(self, caller: str, stored: StoredResponse, previous: str | None) -> None:
        given, response = encode_response(stored)
        size = len(given) + len(response)
        check_fits(size, self._max_bytes)
        with self._rows.changing():
            self._rows.remove_expired()
            self._rows.db.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
                (stored.response_id, caller, previous, time.time() + self._seconds, size, given, response),
            )
            self._rows.grew(1, size)

    def _replace(self, caller: str, stored: StoredResponse) -> bool:
        given, response = encode_response(stored)
        size = len(given) + len(response)
        check_fits(size, self._max_bytes)
        with self._rows.changing():
            row = self._rows.db.execute(
                "SELECT size FROM responses WHERE id = ? AND caller = ?", (stored.response_id, caller)
            ).fetchone()
            if row is None:
                return False
            self._rows.db.execute(
                "UPDATE responses SET size = ?, input = ?, response = ? WHERE id = ?",
                (size, given, response, stored.response_id),
            )
            self._rows.grew(0, size - row[0])
        return True

    def _get(self, caller: str, response_id: str) -> tuple[StoredResponse | None, str | None, int]:
        row = self._rows.db.execute(
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
