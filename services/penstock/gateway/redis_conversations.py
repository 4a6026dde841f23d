"""Conversations that several gateways share: keys of a Redis or Valkey server.

All keys have one hash tag, as those of redis_responses.py: `entries` (caller and id to the JSON), `ages` (to the end of
life, by the server's clock), `sizes` (to bytes), `versions` (to a number that each change raises), `total` (bytes),
`counts` and `bytes` (caller to its conversations, and to their bytes).
"""

from __future__ import annotations

from typing import Any

from penstock.gateway.conversation_store import Change, ConversationBounds, KeptConversation, too_many_conversations
from penstock.gateway.redis_place import RedisPlace
from penstock.gateway.response_store import StoreFailed

_NAMES = ("entries", "ages", "sizes", "versions", "total", "counts", "bytes")
_KEYS = tuple(f"{{penstock:responses}}:conversations:{name}" for name in _NAMES)
_ENTRIES, _AGES, _VERSIONS, _TOTAL = (_KEYS[_NAMES.index(name)] for name in ("entries", "ages", "versions", "total"))
# Expired rows that one call removes: a script holds up the whole server.
_LEAVE_AT_ONCE = 256
# Tries of a change that others overtake.
_MOST_TRIES = 32
_REMOVE = """
local entries, ages, sizes, versions, total, counts, bytes = unpack(KEYS)
local function remove(name)
  -- A server that evicts keys may have forgotten the size: the row leaves all the same.
  local size = redis.call('HGET', sizes, name) or 0
  local caller = string.match(name, '^(.-):')
  local removed = redis.call('HDEL', entries, name)
  redis.call('ZREM', ages, name)
  redis.call('HDEL', sizes, name)
  redis.call('HDEL', versions, name)
  redis.call('DECRBY', total, size)
  if redis.call('HINCRBY', counts, caller, -1) <= 0 then
    redis.call('HDEL', counts, caller)
    redis.call('HDEL', bytes, caller)
  else
    redis.call('HINCRBY', bytes, caller, -size)
  end
  return removed
end
"""
_COUNTS = "return {redis.call('ZCARD', ages), tonumber(redis.call('GET', total) or 0)"
# Its last number: 0 written, 1 another version is there, 2 the caller has too many.
_PUT = f"""{_REMOVE}
local name, caller, version, entry, size = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local seconds, most, most_bytes = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local most_of_caller, most_bytes_of_caller = tonumber(ARGV[9]), tonumber(ARGV[10])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
for _, old in ipairs(redis.call('ZRANGEBYSCORE', ages, '-inf', now, 'LIMIT', 0, {_LEAVE_AT_ONCE})) do remove(old) end
if (redis.call('HGET', versions, name) or '') ~= version then {_COUNTS}, 1}} end
local more = version == '' and 1 or 0
local grown = size - tonumber(redis.call('HGET', sizes, name) or 0)
if caller ~= '' and grown > 0 then
  if tonumber(redis.call('HGET', counts, caller) or 0) + more > most_of_caller
    or tonumber(redis.call('HGET', bytes, caller) or 0) + grown > most_bytes_of_caller then {_COUNTS}, 2}} end
end
redis.call('HSET', entries, name, entry)
redis.call('ZADD', ages, now + seconds, name)
redis.call('HSET', sizes, name, size)
redis.call('HINCRBY', versions, name, 1)
redis.call('INCRBY', total, grown)
redis.call('HINCRBY', counts, caller, more)
redis.call('HINCRBY', bytes, caller, grown)
while redis.call('ZCARD', ages) > most or tonumber(redis.call('GET', total)) > most_bytes do
  local oldest = redis.call('ZRANGE', ages, 0, 0)[1]
  if oldest == name then
    -- There is no other, so the sum was that of rows that were evicted.
    redis.call('SET', total, size)
    break
  end
  remove(oldest)
end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, math.ceil(seconds * 1000)) end
{_COUNTS}, 0}}
"""
_DELETE = f"""{_REMOVE}
local removed = 0
if redis.call('HEXISTS', entries, ARGV[1]) == 1 then removed = remove(ARGV[1]) end
{_COUNTS}, removed}}
"""
_WRITTEN, _FULL = 0, 2


class RedisConversations:
    """ConversationStore on a server of Redis' protocol."""

    def __init__(self, place: RedisPlace, bounds: ConversationBounds) -> None:
        """Make it; nothing is asked yet."""
        self._place, self._bounds = place, bounds
        self.num_conversations = self.num_bytes = 0
        self._put = place.redis.register_script(_PUT)
        self._delete = place.redis.register_script(_DELETE)

    async def open(self) -> None:
        """See ConversationStore."""
        pipe = self._place.redis.pipeline(transaction=False)
        pipe.zcard(_AGES)
        pipe.get(_TOTAL)
        if (counts := await self._place.first(pipe.execute())) is not None:
            self.num_conversations, self.num_bytes = counts[0], int(counts[1] or 0)

    async def add(self, caller: str, conversation: KeptConversation) -> None:
        """See ConversationStore."""
        await self._write(caller, conversation, "")

    async def get(self, caller: str, conversation_id: str) -> KeptConversation | None:
        """See ConversationStore."""
        return (await self._entry(caller, conversation_id))[0]

    async def change(self, caller: str, conversation_id: str, change: Change) -> KeptConversation | None:
        """See ConversationStore."""
        for _ in range(_MOST_TRIES):
            found, version = await self._entry(caller, conversation_id)
            if found is None:
                return None
            change(found)
            if await self._write(caller, found, version):
                return found
        raise StoreFailed("a conversation is changed by too many at once")

    async def delete(self, caller: str, conversation_id: str) -> bool:
        """See ConversationStore."""
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
        if outcome == _FULL:
            raise too_many_conversations()
        return bool(outcome == _WRITTEN)

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
