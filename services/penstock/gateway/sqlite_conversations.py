"""Conversations of one gateway: rows of SQLite beside its responses."""

from __future__ import annotations

import time

from penstock.gateway.bounded_rows import BoundedRows
from penstock.gateway.conversation_store import Change, ConversationBounds, KeptConversation, too_many_conversations
from penstock.gateway.sqlite_place import SqlitePlace

_SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, caller TEXT NOT NULL, expires REAL NOT NULL, size INTEGER NOT NULL, value BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS conversations_by_expiry ON conversations (expires);
CREATE INDEX IF NOT EXISTS conversations_by_caller ON conversations (caller, size);
"""


class SqliteConversations:
    """ConversationStore on SQLite; its calls run on the place's thread."""

    def __init__(self, place: SqlitePlace, bounds: ConversationBounds) -> None:
        """Make its table. Raises StartupError naming --response-store."""
        self._place, self._bounds = place, bounds
        self._rows = BoundedRows(
            place, "conversations", _SCHEMA, most=bounds.max_conversations, most_bytes=bounds.max_bytes
        )

    @property
    def num_conversations(self) -> int:
        return self._rows.count

    @property
    def num_bytes(self) -> int:
        return self._rows.num_bytes

    async def open(self) -> None:
        """The counts are known."""

    async def add(self, caller: str, conversation: KeptConversation) -> None:
        await self._place.run(lambda: self._add(caller, conversation))

    async def get(self, caller: str, conversation_id: str) -> KeptConversation | None:
        return await self._place.run(lambda: self._get(caller, conversation_id)[0])

    async def change(self, caller: str, conversation_id: str, change: Change) -> KeptConversation | None:
        return await self._place.run(lambda: self._change(caller, conversation_id, change))

    async def delete(self, caller: str, conversation_id: str) -> bool:
        return await self._place.run(lambda: self._rows.delete(caller, conversation_id))

    def _get(self, caller: str, conversation_id: str) -> tuple[KeptConversation | None, int]:
        row = self._rows.db.execute(
            "SELECT value, size FROM conversations WHERE id = ? AND caller = ? AND expires >= ?",
            (conversation_id, caller, time.time()),
        ).fetchone()
        return (None, 0) if row is None else (KeptConversation.decoded(row[0]), row[1])

    def _add(self, caller: str, conversation: KeptConversation) -> None:
        data = conversation.encoded()
        self._bounds.check(data)
        with self._rows.changing():
            self._rows.remove_expired()
            self._write(caller, conversation.conversation_id, data, more=1, grown=len(data))

    def _change(self, caller: str, conversation_id: str, change: Change) -> KeptConversation | None:
        found, size = self._get(caller, conversation_id)
        if found is None:
            return None
        change(found)
        data = found.encoded()
        self._bounds.check(data)
        with self._rows.changing():
            self._write(caller, conversation_id, data, more=0, grown=len(data) - size)
        return found

    def _write(self, caller: str, conversation_id: str, data: bytes, *, more: int, grown: int) -> None:
        """Write a row; there are `more` rows then, and `grown` more bytes. Raises ResourceExhausted."""
        if caller and grown > 0:
            count, total = self._rows.sums_of(caller)
            most, most_bytes = self._bounds.most_of_caller
            if count + more > most or total + grown > most_bytes:
                raise too_many_conversations()
        self._rows.db.execute(
            "INSERT OR REPLACE INTO conversations VALUES (?, ?, ?, ?, ?)",
            (conversation_id, caller, time.time() + self._bounds.seconds, len(data), data),
        )
        self._rows.grew(more, grown)
