"""Rows of one SQLite table that are counted and bounded, in number and in bytes together: the oldest leave."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.gateway.sqlite_place import SqlitePlace


class BoundedRows:
    """A table with columns `id`, `caller`, `expires` and `size`. Its methods run on the place's thread."""

    def __init__(self, place: SqlitePlace, table: str, schema: str, *, most: int, most_bytes: int) -> None:
        """Make the table by `schema`, and count its rows. Raises StartupError naming --response-store."""
        place.add(schema)
        self.db = place.db
        self._table, self._most, self._most_bytes = table, most, most_bytes
        self._sums = f"SELECT count(*), coalesce(sum(size), 0) FROM {table}"
        self.count: int
        self.num_bytes: int
        # All rows have one lifetime, so this is the order of age.
        self._oldest = f"SELECT id, size FROM {table} ORDER BY expires, rowid LIMIT 16"
        try:
            self.count, self.num_bytes = self.db.execute(self._sums).fetchone()
        except sqlite3.Error as error:
            raise place.refusal(error) from error

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change rows and counts together, or neither: the disk may fill up at any statement, or at the commit.

        The oldest rows leave at the end until the bounds are met.
        """
        before = self.count, self.num_bytes
        try:
            with self.db:
                yield
                while self._has_too_many():
                    self._remove(self._oldest, enough=True)
        except BaseException:
            self.count, self.num_bytes = before
            raise

    def grew(self, more: int, num_bytes: int) -> None:
        """Count what was written within `changing`: `more` rows, and `num_bytes` more bytes."""
        self.count += more
        self.num_bytes += num_bytes

    def sums_of(self, caller: str) -> tuple[int, int]:
        """Return the number of a caller's rows, and their bytes."""
        count, num_bytes = self.db.execute(f"{self._sums} WHERE caller = ?", (caller,)).fetchone()
        return count, num_bytes

    def remove_expired(self) -> None:
        """Delete, within `changing`, the rows with a life that is over."""
        self._remove(f"SELECT id, size FROM {self._table} WHERE expires < ?", time.time())

    def delete(self, caller: str, row_id: str) -> bool:
        """Delete a row of the caller's; False if there is none."""
        before = self.count
        with self.changing():
            self._remove(f"SELECT id, size FROM {self._table} WHERE id = ? AND caller = ?", row_id, caller)
        return bool(self.count < before)

    def _has_too_many(self) -> bool:
        return bool(self.count > self._most or self.num_bytes > self._most_bytes)

    def _remove(self, query: str, *values: object, enough: bool = False) -> None:
        """Delete the rows that a query finds; with `enough` only until the bounds are met."""
        for row_id, size in self.db.execute(query, values).fetchall():
            if enough and not self._has_too_many():
                return
            self.db.execute(f"DELETE FROM {self._table} WHERE id = ?", (row_id,))
            self.grew(-1, -size)
