"""Signs of life of responses in progress, for the gateways that share a store: who reads one learns that somebody
makes it, and may ask for its end."""

from __future__ import annotations

from typing import Protocol

from penstock.gateway.redis_place import RedisPlace

_RUNS, _ENDS = b"runs", b"ends"


class LifeSigns(Protocol):
    """Signs of life by caller and response; each lives a number of seconds. All raise StoreFailed."""

    async def renew(self, caller: str, response_id: str) -> bool:
        """Note that this gateway makes a response; True: another gateway asked for its end."""

    async def drop(self, caller: str, response_id: str) -> None:
        """Note that a response has ended."""

    async def is_held(self, caller: str, response_id: str) -> bool:
        """True where a gateway makes the response."""

    async def ask_end(self, caller: str, response_id: str) -> bool:
        """Ask the gateway that makes a response for its end; False: none does."""


class NoLifeSigns:
    """LifeSigns where there is no other gateway."""

    async def renew(self, caller: str, response_id: str) -> bool:
        return False

    async def drop(self, caller: str, response_id: str) -> None:
        pass

    async def is_held(self, caller: str, response_id: str) -> bool:
        return False

    async def ask_end(self, caller: str, response_id: str) -> bool:
        return False


class RedisLifeSigns:
    """LifeSigns as keys of a Redis server, which forgets them by itself."""

    def __init__(self, place: RedisPlace, seconds: float) -> None:
        """`seconds`: time that a sign lasts which nobody renews."""
        self._place, self._milliseconds = place, max(1, int(seconds * 1000))

    async def renew(self, caller: str, response_id: str) -> bool:
        key = _key(caller, response_id)
        pipe = self._place.redis.pipeline(transaction=False)
        pipe.set(key, _RUNS, px=self._milliseconds, nx=True)
        pipe.pexpire(key, self._milliseconds)
        pipe.get(key)
        return bool((await self._place.call(pipe.execute()))[2] == _ENDS)

    async def drop(self, caller: str, response_id: str) -> None:
        await self._place.call(self._place.redis.delete(_key(caller, response_id)))

    async def is_held(self, caller: str, response_id: str) -> bool:
        return bool(await self._place.call(self._place.redis.exists(_key(caller, response_id))))

    async def ask_end(self, caller: str, response_id: str) -> bool:
        key = _key(caller, response_id)
        return bool(await self._place.call(self._place.redis.set(key, _ENDS, px=self._milliseconds, xx=True)))


def _key(caller: str, response_id: str) -> str:
    return f"{{penstock:responses}}:sign:{caller}:{response_id}"
