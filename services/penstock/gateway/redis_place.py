"""Server of Redis' protocol that several gateways share: its address, its connections, its failures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.common.shown_url import shown_url
from penstock.gateway.response_store import StoreFailed

if TYPE_CHECKING:
    from redis.asyncio import Redis

_log = get_logger("penstock.gateway")
# Valkey speaks Redis' protocol; the library knows only the older names.
SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}


def is_shared(place: str) -> bool:
    """True for the address of a server rather than a file."""
    return urlsplit(place).scheme in SCHEMES


class RedisPlace:
    """Connections to one server, version 5 or later, that several stores share."""

    def __init__(self, url: str, *, timeout_seconds: float, connections: int) -> None:
        """Make it without a connection. Raises StartupError naming --response-store for an invalid address.

        `timeout_seconds`: for each call to the server. `connections`: most connections to it.
        """
        parts, self._shown = urlsplit(url), shown_url(url)
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
        self.redis: Redis = Redis(connection_pool=pool)

    def _refusal(self, why: str) -> StartupError:
        return StartupError(f"--response-store {self._shown}: {why}", flag="--response-store")

    async def first(self, call: Any) -> Any:
        """Await the first call; None where the server is not there yet, and a warning says so.

        Raises StartupError where no later try can succeed.
        """
        from redis.exceptions import AuthenticationError, ResponseError

        try:
            return await call
        except (AuthenticationError, ResponseError) as error:
            # A wrong password or database, or missing rights.
            raise self._refusal(str(error)) from error
        except (self._error, OSError) as error:
            _log.warning(
                "the store of responses cannot be reached: no response is kept until it can", cause=_why(error)
            )
            return None

    async def call(self, call: Any) -> Any:
        """Await a call. Raises StoreFailed."""
        try:
            return await call
        except (self._error, OSError) as error:
            raise StoreFailed(_why(error)) from error

    async def close(self) -> None:
        """Close its connections. A second call does nothing."""
        await self.redis.aclose(close_connection_pool=True)


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
