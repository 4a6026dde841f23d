"""Scripts by which the stores of responses and of conversations change their keys at a server of Redis' protocol.

A script changes all keys of a store as one. The keys come first, then a function that removes a row, then the work.
Every script returns the number of rows, their bytes, and its outcome.
"""

from __future__ import annotations

# Expired rows that one call removes: a script holds up the whole server.
_LEAVE_AT_ONCE = 256
_COUNTS = "return {redis.call('ZCARD', ages), tonumber(redis.call('GET', total) or 0)"
# The server's time, and the rows that it has seen expire.
_SWEEP = f"""
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
for _, old in ipairs(redis.call('ZRANGEBYSCORE', ages, '-inf', now, 'LIMIT', 0, {_LEAVE_AT_ONCE})) do remove(old) end
"""
# Lives of the keys themselves.
_EXPIRE = "for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, math.ceil(seconds * 1000)) end\n"
_TAKE_OUT = """
  -- A server that evicts keys may have forgotten the size: the row leaves all the same.
  local size = redis.call('HGET', sizes, name) or 0
  local removed = redis.call('HDEL', entries, name)
  redis.call('ZREM', ages, name)
  redis.call('HDEL', sizes, name)
  redis.call('DECRBY', total, size)
"""
_REMOVE_RESPONSE = f"""
local entries, ages, sizes, total = unpack(KEYS)
local function remove(name)
{_TAKE_OUT}
  return removed
end
"""
_REMOVE_CONVERSATION = f"""
local entries, ages, sizes, versions, total, counts, bytes = unpack(KEYS)
local function remove(name)
{_TAKE_OUT}
  local caller = string.match(name, '^(.-):')
  redis.call('HDEL', versions, name)
  if redis.call('HINCRBY', counts, caller, -1) <= 0 then
    redis.call('HDEL', counts, caller)
    redis.call('HDEL', bytes, caller)
  else
    redis.call('HINCRBY', bytes, caller, -size)
  end
  return removed
end
"""


def _make_room(oldest: str) -> str:
    """Return the loop that removes rows until the bounds are met; `oldest`: code that finds the next one."""
    return f"""
while redis.call('ZCARD', ages) > most or tonumber(redis.call('GET', total)) > most_bytes do
  {oldest}
  if oldest == name then
    -- There is no other, so the sum was that of rows that were evicted.
    redis.call('SET', total, size)
    break
  end
  remove(oldest)
end
"""


# KEYS: entries, ages, sizes, total. ARGV: name, entry, its bytes; life in seconds, most rows, most bytes; 1 for a new
# row, 0 for one that is written anew. The outcome is 0 where a row to write anew is not there.
PUT_RESPONSE = f"""{_REMOVE_RESPONSE}
local name, entry, size = ARGV[1], ARGV[2], tonumber(ARGV[3])
local seconds, most, most_bytes = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
{_SWEEP}
local ends = now + seconds
if ARGV[7] == '0' then
  -- It is there, or was deleted meanwhile; its life does not begin again.
  ends = redis.call('ZSCORE', ages, name)
  if not ends then {_COUNTS}, 0}} end
end
remove(name)
redis.call('HSET', entries, name, entry)
redis.call('ZADD', ages, ends, name)
redis.call('HSET', sizes, name, size)
redis.call('INCRBY', total, size)
{_make_room("local old = redis.call('ZRANGE', ages, 0, 1); local oldest = old[1] == name and old[2] or old[1]")}
{_EXPIRE}
{_COUNTS}, 1}}
"""
# KEYS as above. ARGV: name. The outcome is the number of rows that were removed.
DELETE_RESPONSE = f"{_REMOVE_RESPONSE}\nlocal removed = remove(ARGV[1])\n{_COUNTS}, removed}}"
# Outcomes of PUT_CONVERSATION: written, another version is there, the caller has too many.
WRITTEN, CHANGED, FULL = 0, 1, 2
# KEYS: entries, ages, sizes, versions, total, counts, bytes. ARGV: name, caller, version that is written over, entry,
# its bytes; life in seconds, most rows, most bytes; most rows and most bytes of the caller.
PUT_CONVERSATION = f"""{_REMOVE_CONVERSATION}
local name, caller, version, entry, size = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local seconds, most, most_bytes = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local most_of_caller, most_bytes_of_caller = tonumber(ARGV[9]), tonumber(ARGV[10])
{_SWEEP}
if (redis.call('HGET', versions, name) or '') ~= version then {_COUNTS}, {CHANGED}}} end
local more = version == '' and 1 or 0
local grown = size - tonumber(redis.call('HGET', sizes, name) or 0)
if caller ~= '' and grown > 0 then
  if tonumber(redis.call('HGET', counts, caller) or 0) + more > most_of_caller
    or tonumber(redis.call('HGET', bytes, caller) or 0) + grown > most_bytes_of_caller then {_COUNTS}, {FULL}}} end
end
redis.call('HSET', entries, name, entry)
redis.call('ZADD', ages, now + seconds, name)
redis.call('HSET', sizes, name, size)
redis.call('HINCRBY', versions, name, 1)
redis.call('INCRBY', total, grown)
redis.call('HINCRBY', counts, caller, more)
redis.call('HINCRBY', bytes, caller, grown)
{_make_room("local oldest = redis.call('ZRANGE', ages, 0, 0)[1]")}
{_EXPIRE}
{_COUNTS}, {WRITTEN}}}
"""
# KEYS as above. ARGV: name. The outcome is the number of rows that were removed.
DELETE_CONVERSATION = f"""{_REMOVE_CONVERSATION}
local removed = 0
if redis.call('HEXISTS', entries, ARGV[1]) == 1 then removed = remove(ARGV[1]) end
{_COUNTS}, removed}}
"""
