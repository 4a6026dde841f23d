"""Database that processes of several machines share, of PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from penstock.common.errors import StartupError
from penstock.database.transactions import DatabaseFailed, Rows

if TYPE_CHECKING:
    from psycopg import Connection

T = TypeVar("T")
# Key of the lock under which one process makes the tables: "CREATE IF NOT EXISTS" of two at once may fail.
_SCHEMA_LOCK = 0x70656E73
_CONNECT_SECONDS = 10
# Milliseconds after which the server gives up a statement.
_STATEMENT_MILLISECONDS = 60_000


@cache
def _in_its_style(statement: str) -> str:
    """Return a statement with the placeholders of psycopg."""
    return statement.replace("%", "%%").replace("?", "%s")


class _PostgresRows:
    """Rows of PostgreSQL."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._connection = connection

    def all(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """See Rows."""
        found: list[tuple[Any, ...]] = self._connection.execute(_in_its_style(statement), values).fetchall()
        return found

    def change(self, statement: str, *values: Any) -> int:
        """See Rows."""
        return int(self._connection.execute(_in_its_style(statement), values).rowcount)

    def change_many(self, statement: str, values: list[tuple[Any, ...]]) -> None:
        """See Rows."""
        if values:
            with self._connection.cursor() as cursor:
                cursor.executemany(_in_its_style(statement), values)


class PostgresDatabase:
    """Database on PostgreSQL, 9.5 or later. One connection, which is made anew after it broke."""

    skip_claimed = " FOR UPDATE SKIP LOCKED"
    lock = " FOR UPDATE"
    is_own = False

    def __init__(self, url: str, flag: str, schema: Sequence[str], application: str) -> None:
        """Make it without a connection. `flag` named the address; `application` is its name at the server.

        Raises StartupError naming the flag when the package is missing.
        """
        self._url, self._flag, self._schema, self._application = url, flag, schema, application
        # The address for messages, without its password.
        parts = urlsplit(url)
        self._shown = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))
        try:
            import psycopg
        except ImportError as error:
            raise StartupError(
                f"{flag} {self._shown} needs the package psycopg: pip install 'penstock[postgres]'",
                flag=flag,
            ) from error
        self._psycopg = psycopg
        self._thread = ThreadPoolExecutor(1, "database")
        self._connection: Connection[Any] | None = None
        self._is_closed = False

    async def open(self) -> None:
        """See Database."""
        try:
            await self._do(self._make_tables)
        except (self._psycopg.Error, DatabaseFailed) as error:
            raise StartupError(f"{self._flag} {self._shown}: {error}", flag=self._flag) from error

    def _make_tables(self) -> None:
        connection = self._connected()
        with connection.transaction():
            connection.execute(f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})")
            for statement in self._schema:
                connection.execute(statement)

    async def close(self) -> None:
        """See Database."""
        if not self._is_closed:
            self._is_closed = True
            connection, self._connection = self._connection, None
            if connection is not None:
                await self._do(connection.close)
            self._thread.shutdown(wait=False)

    async def run(self, work: Callable[[Rows], T]) -> T:
        """See Database."""
        try:
            return await self._do(lambda: self._transact(work))
        except self._psycopg.Error as error:
            raise DatabaseFailed(str(error)) from error

    async def _do(self, work: Callable[[], T]) -> T:
        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        except RuntimeError as error:
            raise DatabaseFailed("it is closed") from error
        return await running

    def _transact(self, work: Callable[[Rows], T]) -> T:
        if self._is_closed:
            raise DatabaseFailed("it is closed")
        connection = self._connected()
        try:
            with connection.transaction():
                return work(_PostgresRows(connection))
        except self._psycopg.OperationalError:
            # The next transaction makes a new one, whatever is wrong with this.
            self._connection = None
            connection.close()
            raise

    def _connected(self) -> Connection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = self._psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=_CONNECT_SECONDS,
                options=f"-c statement_timeout={_STATEMENT_MILLISECONDS}",
                application_name=self._application,
            )
        return self._connection
