"""Responses that several gateways share: keys of a Redis or Valkey server.

All keys have one hash tag, so that a cluster keeps them on one node and a script may change them together: `entries`
(caller and id to the JSON), `ages` (to the end of life, by the server's clock), `sizes` (to bytes) and `total` (bytes).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.gateway.response_store import StoredResponse, StoreFailed, check_fits, encode_response

if TYPE_CHECKING:
    from redis.asyncio import Redis

_log = get_logger("penstock.gateway")
# Valkey speaks Redis' protocol; the library knows only the older names.
SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}
_KEYS = tuple(f"{{penstock:responses}}:{name}" for name in ("entries", "ages", "sizes", "total"))
_ENTRIES, _AGES, _, _TOTAL = _KEYS
# Expired rows that one call removes: a script holds up the whole server.
_LEAVE_AT_ONCE = 256
_REMOVE = """
local entries, ages, sizes, total = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local function remove(name)
  -- A server that evicts keys may have forgotten the size: the row leaves all the same.
  local size = redis.call('HGET', sizes, name) or 0
  local removed = redis.call('HDEL', entries, name)
  redis.call('ZREM', ages, name)
  redis.call('HDEL', sizes, name)
  redis.call('DECRBY', total, size)
  return removed
end
"""
_COUNTS = "return {redis.call('ZCARD', ages), tonumber(redis.call('GET', total) or 0)"
_PUT = f"""{_REMOVE}
local name, entry, size = ARGV[1], ARGV[2], tonumber(ARGV[3])
local seconds, most, most_bytes = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
for _, old in ipairs(redis.call('ZRANGEBYSCORE', ages, '-inf', now, 'LIMIT', 0, {_LEAVE_AT_ONCE})) do remove(old) end
remove(name)
redis.call('HSET', entries, name, entry)
redis.call('ZADD', ages, now + seconds, name)
redis.call('HSET', sizes, name, size)
redis.call('INCRBY', total, size)
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
{_COUNTS}}}
"""
_DELETE = f"{_REMOVE}\nlocal removed = remove(ARGV[1])\n{_COUNTS}, removed}}"


def is_shared(place: str) -> bool:
    """True for the address of a server rather than a file."""
    return urlsplit(place).scheme in SCHEMES


class RedisResponses:
    """ResponseStore on a server of Redis' protocol, version 5 or later."""

    def __init__(
        self, url: str, *, max_responses: int, max_bytes: int, seconds: float, timeout_seconds: float, connections: int
    ) -> None:
        """Make it without a connection. Raises StartupError naming the flag for an invalid address.

        `timeout_seconds`: for each call to the server. `connections`: most connections to it.
        """
        self._max_responses, self._max_bytes, self._seconds = max_responses, max_bytes, seconds
        # The address for messages, without its password.
        parts = urlsplit(url)
        self._shown = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))
        self.num_responses = self.num_bytes = 0
        try:
            from redis.asyncio import BlockingConnectionPool, Redis
            from redis.exceptions import RedisError
        except ImportError as error:
            raise self._refusal("a shared store needs the package redis: pip install 'penstock[redis]'") from error
        self._error = RedisError
        try:
            pool = BlockingConnectionPool.from_url(
                urlunsplit(parts._replace(scheme=SCHEMES[parts.scheme])),
                max_connections=connections,
                timeout=timeout_seconds,
                socket_timeout=timeout_seconds,
                socket_connect_timeout=timeout_seconds,
            )
        except ValueError as error:
            raise self._refusal(str(error)) from error
        self._redis: Redis = Redis(connection_pool=pool)
        self._put = self._redis.register_script(_PUT)
        self._delete = self._redis.register_script(_DELETE)

    def _refusal(self, why: str) -> StartupError:
        return StartupError(f"--response-store {self._shown}: {why}", flag="--response-store")

    async def open(self) -> None:
        """See ResponseStore. Nobody waits for a server that is not there yet: a warning says so."""
        from redis.exceptions import AuthenticationError, ResponseError

        try:
            self.num_responses, total = await self._redis.zcard(_AGES), await self._redis.get(_TOTAL)
            self.num_bytes = int(total or 0)
        except (AuthenticationError, ResponseError) as error:
            # A wrong password or database, or missing rights.
            raise self._refusal(str(error)) from error
        except (self._error, OSError) as error:
            _log.warning(
                "the store of responses cannot be reached: no response is kept until it can", cause=_why(error)
            )

    async def close(self) -> None:
        """See ResponseStore."""
        await self._redis.aclose(close_connection_pool=True)

    async def put(self, caller: str, stored: StoredResponse, previous: str | None) -> None:
        """See ResponseStore."""
        given, response = encode_response(stored)
        size = len(given) + len(response)
        check_fits(size, self._max_bytes)
        entry = b'{"size":%d,"previous":%b,"input":%b,"response":%b}' % (
            size,
            json.dumps(previous).encode(),
            given,
            response,
        )
        name = _name(caller, stored.response_id)
        counts = await self._call(
            self._put(_KEYS, (name, entry, size, self._seconds, self._max_responses, self._max_bytes))
        )
        self.num_responses, self.num_bytes = counts

    async def get(self, caller: str, response_id: str) -> StoredResponse | None:
        """See ResponseStore."""
        found = await self._entry(caller, response_id)
        return None if found is None else StoredResponse(found["response"], found["input"])

    async def chain(self, caller: str, response_id: str, max_bytes: int) -> list[StoredResponse] | None:
        """See ResponseStore."""
        found: list[StoredResponse] = []
        at: str | None = response_id
        while at is not None:
            entry = await self._entry(caller, at)
            if entry is None:
                return None
            max_bytes -= entry["size"]
            if max_bytes < 0:
                raise OverflowError
            found.append(StoredResponse(entry["response"], entry["input"]))
            at = entry["previous"]
        return found[::-1]

    async def delete(self, caller: str, response_id: str) -> bool:
        """See ResponseStore."""
        *counts, removed = await self._call(self._delete(_KEYS, (_name(caller, response_id),)))
        self.num_responses, self.num_bytes = counts
        return bool(removed)

    async def _entry(self, caller: str, response_id: str) -> dict[str, Any] | None:
        """Return the entry under a name if it has not expired, by the server's clock."""
        name = _name(caller, response_id)
        pipe = self._redis.pipeline(transaction=False)
        pipe.hget(_ENTRIES, name)
        pipe.zscore(_AGES, name)
        pipe.time()
        entry, ends, (seconds, microseconds) = await self._call(pipe.execute())
        if entry is None or ends is None or ends <= seconds + microseconds / 1e6:
            return None
        found: dict[str, Any] = json.loads(entry)
        return found

    async def _call(self, call: Any) -> Any:
        try:
            return await call
        except (self._error, OSError) as error:
            raise StoreFailed(_why(error)) from error


def _name(caller: str, response_id: str) -> str:
    return f"{caller}:{response_id}"


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
