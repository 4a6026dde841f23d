"""Responses that several gateways share: keys of a Redis or Valkey server.

All keys have one hash tag, so that a cluster keeps them on one node and a script may change them together: `entries`
(caller and id to the JSON), `ages` (to the end of life, by the server's clock), `sizes` (to bytes) and `total` (bytes).
"""

from __future__ import annotations

import json
from typing import Any

from penstock.gateway.redis_place import RedisPlace
from penstock.gateway.redis_scripts import DELETE_RESPONSE, PUT_RESPONSE
from penstock.gateway.response_store import StoredResponse, check_fits, encode_response

_KEYS = tuple(f"{{penstock:responses}}:{name}" for name in ("entries", "ages", "sizes", "total"))
_ENTRIES, _AGES, _, _TOTAL = _KEYS


class RedisResponses:
    """ResponseStore on a server of Redis' protocol, version 5 or later."""

    def __init__(
        self, url: str, *, max_responses: int, max_bytes: int, seconds: float, timeout_seconds: float, connections: int
    ) -> None:
        """Make it without a connection. Raises StartupError naming the flag for an invalid address.

        `timeout_seconds`: for each call to the server. `connections`: most connections to it.
        """
        self._max_responses, self._max_bytes, self._seconds = max_responses, max_bytes, seconds
        self.num_responses = self.num_bytes = 0
        self.place = RedisPlace(url, timeout_seconds=timeout_seconds, connections=connections)
        self._redis = self.place.redis
        self._put = self._redis.register_script(PUT_RESPONSE)
        self._delete = self._redis.register_script(DELETE_RESPONSE)

    async def open(self) -> None:
        """Nobody waits for a server that is not there yet: a warning says so."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.zcard(_AGES)
        pipe.get(_TOTAL)
        if (counts := await self.place.first(pipe.execute())) is not None:
            self.num_responses, self.num_bytes = counts[0], int(counts[1] or 0)

    async def close(self) -> None:
        await self.place.close()

    async def put(self, caller: str, stored: StoredResponse, previous: str | None) -> None:
        await self._write(caller, stored, previous, is_new=True)

    async def replace(self, caller: str, stored: StoredResponse, previous: str | None) -> bool:
        return await self._write(caller, stored, previous, is_new=False)

    async def _write(self, caller: str, stored: StoredResponse, previous: str | None, *, is_new: bool) -> bool:
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
        bounds = (self._seconds, self._max_responses, self._max_bytes)
        *counts, is_written = await self.place.call(self._put(_KEYS, (name, entry, size, *bounds, int(is_new))))
        self.num_responses, self.num_bytes = counts
        return bool(is_written)

    async def get(self, caller: str, response_id: str) -> StoredResponse | None:
        found = await self._entry(caller, response_id)
        return None if found is None else StoredResponse(found["response"], found["input"])

    async def chain(self, caller: str, response_id: str, max_bytes: int) -> list[StoredResponse] | None:
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
        *counts, removed = await self.place.call(self._delete(_KEYS, (_name(caller, response_id),)))
        self.num_responses, self.num_bytes = counts
        return bool(removed)

    async def _entry(self, caller: str, response_id: str) -> dict[str, Any] | None:
        """Return the entry under a name if it has not expired, by the server's clock."""
        name = _name(caller, response_id)
        pipe = self._redis.pipeline(transaction=False)
        pipe.hget(_ENTRIES, name)
        pipe.zscore(_AGES, name)
        pipe.time()
        entry, ends, (seconds, microseconds) = await self.place.call(pipe.execute())
        if entry is None or ends is None or ends <= seconds + microseconds / 1e6:
            return None
        found: dict[str, Any] = json.loads(entry)
        return found


def _name(caller: str, response_id: str) -> str:
    return f"{caller}:{response_id}"
