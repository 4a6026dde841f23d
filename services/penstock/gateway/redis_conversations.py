"""Conversations that several gateways share: keys of a Redis or Valkey server.

All keys have one hash tag, as those of redis_responses.py: `entries` (caller and id to the JSON), `ages` (to the end of
life, by the server's clock), `sizes` (to bytes), `versions` (to a number that each change raises), `total` (bytes),
`counts` and `bytes` (caller to its conversations, and to their bytes).
"""

from __future__ import annotations

from typing import Any

from penstock.gateway.conversation_store import Change, ConversationBounds, KeptConversation, too_many_conversations
from penstock.gateway.redis_place import RedisPlace
from penstock.gateway.redis_scripts import DELETE_CONVERSATION, FULL, PUT_CONVERSATION, WRITTEN
from penstock.gateway.response_store import StoreFailed

_NAMES = ("entries", "ages", "sizes", "versions", "total", "counts", "bytes")
_KEYS = tuple(f"{{penstock:responses}}:conversations:{name}" for name in _NAMES)
_ENTRIES, _AGES, _VERSIONS, _TOTAL = (_KEYS[_NAMES.index(name)] for name in ("entries", "ages", "versions", "total"))
# Tries of a change that others overtake.
_MOST_TRIES = 32


class RedisConversations:
    """ConversationStore on a server of Redis' protocol."""

    def __init__(self, place: RedisPlace, bounds: ConversationBounds) -> None:
        """Make it; nothing is asked yet."""
        self._place, self._bounds = place, bounds
        self.num_conversations = self.num_bytes = 0
        self._put = place.redis.register_script(PUT_CONVERSATION)
        self._delete = place.redis.register_script(DELETE_CONVERSATION)

    async def open(self) -> None:
        pipe = self._place.redis.pipeline(transaction=False)
        pipe.zcard(_AGES)
        pipe.get(_TOTAL)
        if (counts := await self._place.first(pipe.execute())) is not None:
            self.num_conversations, self.num_bytes = counts[0], int(counts[1] or 0)

    async def add(self, caller: str, conversation: KeptConversation) -> None:
        await self._write(caller, conversation, "")

    async def get(self, caller: str, conversation_id: str) -> KeptConversation | None:
        return (await self._entry(caller, conversation_id))[0]

    async def change(self, caller: str, conversation_id: str, change: Change) -> KeptConversation | None:
        for _ in range(_MOST_TRIES):
            found, version = await self._entry(caller, conversation_id)
            if found is None:
                return None
            change(found)
            if await self._write(caller, found, version):
                return found
        raise StoreFailed("a conversation is changed by too many at once")

    async def delete(self, caller: str, conversation_id: str) -> bool:
        name = _name(caller, conversation_id)
        self.num_conversations, self.num_bytes, removed = await self._place.call(self._delete(_KEYS, (name,)))
        return bool(removed)

    async def _write(self, caller: str, conversation: KeptConversation, version: str) -> bool:
        """Write a conversation over the version that it was; False: there is another. Raises ResourceExhausted."""
        data = conversation.encoded()
        bounds = self._bounds
        bounds.check(data)
        name = _name(caller, conversation.conversation_id)
        limits: tuple[Any, ...] = (bounds.seconds, bounds.max_conversations, bounds.max_bytes, *bounds.most_of_caller)
        self.num_conversations, self.num_bytes, outcome = await self._place.call(
            self._put(_KEYS, (name, caller, version, data, len(data), *limits))
        )
        if outcome == FULL:
            raise too_many_conversations()
        return bool(outcome == WRITTEN)

    async def _entry(self, caller: str, conversation_id: str) -> tuple[KeptConversation | None, str]:
        """Return a conversation that has not expired, by the server's clock, and its version."""
        name = _name(caller, conversation_id)
        # Together: a change between them would be undone by a writer who read half of it.
        pipe = self._place.redis.pipeline(transaction=True)
        pipe.hget(_ENTRIES, name)
        pipe.hget(_VERSIONS, name)
        pipe.zscore(_AGES, name)
        pipe.time()
        entry, version, ends, (seconds, microseconds) = await self._place.call(pipe.execute())
        if entry is None or version is None or ends is None or ends <= seconds + microseconds / 1e6:
            return None, ""
        return KeptConversation.decoded(entry), version.decode()


def _name(caller: str, conversation_id: str) -> str:
    return f"{caller}:{conversation_id}"
