"""Conversations of one gateway: rows of SQLite beside its responses."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.gateway.conversation_store import Change, ConversationBounds, KeptConversation, too_many_conversations
from penstock.gateway.sqlite_place import SqlitePlace

_SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, caller TEXT NOT NULL, expires REAL NOT NULL, size INTEGER NOT NULL, value BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS conversations_by_expiry ON conversations (expires);
CREATE INDEX IF NOT EXISTS conversations_by_caller ON conversations (caller, size);
"""
_SUMS = "SELECT count(*), coalesce(sum(size), 0) FROM conversations"
_OLDEST = "SELECT id, size FROM conversations ORDER BY expires, rowid LIMIT 16"


class SqliteConversations:
    """ConversationStore on SQLite; its calls run on the place's thread."""

    def __init__(self, place: SqlitePlace, bounds: ConversationBounds) -> None:
        """Make its table. Raises StartupError naming --response-store."""
        self._place, self._bounds = place, bounds
        place.add(_SCHEMA)
        self._db = place.db
        try:
            self.num_conversations, self.num_bytes = self._db.execute(_SUMS).fetchone()
        except sqlite3.Error as error:
            raise place.refusal(error) from error

    async def open(self) -> None:
        """See ConversationStore: the counts are known."""

    async def add(self, caller: str, conversation: KeptConversation) -> None:
        """See ConversationStore."""
        await self._place.run(lambda: self._add(caller, conversation))

    async def get(self, caller: str, conversation_id: str) -> KeptConversation | None:
        """See ConversationStore."""
        return await self._place.run(lambda: self._get(caller, conversation_id)[0])

    async def change(self, caller: str, conversation_id: str, change: Change) -> KeptConversation | None:
        """See ConversationStore."""
        return await self._place.run(lambda: self._change(caller, conversation_id, change))

    async def delete(self, caller: str, conversation_id: str) -> bool:
        """See ConversationStore."""
        return await self._place.run(lambda: self._delete(caller, conversation_id))

    def _get(self, caller: str, conversation_id: str) -> tuple[KeptConversation | None, int]:
        row = self._db.execute(
            "SELECT value, size FROM conversations WHERE id = ? AND caller = ? AND expires >= ?",
            (conversation_id, caller, time.time()),
        ).fetchone()
        return (None, 0) if row is None else (KeptConversation.decoded(row[0]), row[1])

    def _add(self, caller: str, conversation: KeptConversation) -> None:
        data = conversation.encoded()
        self._bounds.check(data)
        with self._transaction():
            self._remove("SELECT id, size FROM conversations WHERE expires < ?", time.time())
            self._write(caller, conversation.conversation_id, data, more=1, grown=len(data))

    def _change(self, caller: str, conversation_id: str, change: Change) -> KeptConversation | None:
        found, size = self._get(caller, conversation_id)
        if found is None:
            return None
        change(found)
        data = found.encoded()
        self._bounds.check(data)
        with self._transaction():
            self._write(caller, conversation_id, data, more=0, grown=len(data) - size)
        return found

    def _write(self, caller: str, conversation_id: str, data: bytes, *, more: int, grown: int) -> None:
        """Write a row; there are `more` rows then, and `grown` more bytes. Raises ResourceExhausted."""
        if caller and grown > 0:
            count, total = self._db.execute(f"{_SUMS} WHERE caller = ?", (caller,)).fetchone()
            most, most_bytes = self._bounds.most_of_caller
            if count + more > most or total + grown > most_bytes:
                raise too_many_conversations()
        self._db.execute(
            "INSERT OR REPLACE INTO conversations VALUES (?, ?, ?, ?, ?)",
            (conversation_id, caller, time.time() + self._bounds.seconds, len(data), data),
        )
        self.num_conversations += more
        self.num_bytes += grown
        while self._has_too_many():
            self._remove(_OLDEST, enough=True)

    def _has_too_many(self) -> bool:
        bounds = self._bounds
        return bool(self.num_conversations > bounds.max_conversations or self.num_bytes > bounds.max_bytes)

    def _remove(self, query: str, *values: object, enough: bool = False) -> None:
        """Delete the rows that a query finds; with `enough` only until the bounds are met."""
        for row_id, size in self._db.execute(query, values).fetchall():
            if enough and not self._has_too_many():
                return
            self._db.execute("DELETE FROM conversations WHERE id = ?", (row_id,))
            self.num_conversations -= 1
            self.num_bytes -= size

    def _delete(self, caller: str, conversation_id: str) -> bool:
        before = self.num_conversations
        with self._transaction():
            self._remove("SELECT id, size FROM conversations WHERE id = ? AND caller = ?", conversation_id, caller)
        return bool(self.num_conversations < before)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Change rows and counts together, or neither."""
        before = self.num_conversations, self.num_bytes
        try:
            with self._db:
                yield
        except BaseException:
            self.num_conversations, self.num_bytes = before
            raise
