"""Database that processes of several machines share, of PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.common.errors import StartupError
from penstock.common.shown_url import shown_url
from penstock.database.transactions import DatabaseFailed, Rows
from penstock.database.work_thread import WorkThread

if TYPE_CHECKING:
    from psycopg import Connection

T = TypeVar("T")
# Key of the lock under which one process makes the tables: "CREATE IF NOT EXISTS" of two at once may fail.
_SCHEMA_LOCK = 0x70656E73
# A silent server is asked so often, in the last half of the time that it has, whether it is there.
_PROBES = 3
# Seconds in which the thread is to close the connection. Nobody can wake it on the way to one.
_CLOSE_SECONDS = 1.0


@cache
def _in_its_style(statement: str) -> str:
    """Return a statement with the placeholders of psycopg."""
    return statement.replace("%", "%%").replace("?", "%s")


class _PostgresRows:
    """Rows of PostgreSQL."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._connection = connection

    def all(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = self._connection.execute(_in_its_style(statement), values).fetchall()
        return found

    def change(self, statement: str, *values: Any) -> int:
        return int(self._connection.execute(_in_its_style(statement), values).rowcount)

    def change_many(self, statement: str, values: list[tuple[Any, ...]]) -> None:
        if values:
            with self._connection.cursor() as cursor:
                cursor.executemany(_in_its_style(statement), values)


class PostgresDatabase:
    """Database on PostgreSQL, 9.5 or later. One connection, which is made anew after it broke.

    A server that says nothing for the time that one transaction may take is given up: it may be cut off, or stand
    still.
    """

    skip_claimed = " FOR UPDATE SKIP LOCKED"
    lock = " FOR UPDATE"
    is_own = False

    def __init__(self, url: str, flag: str, schema: Sequence[str], application: str, *, seconds: float) -> None:
        """Make it without a connection. `flag` named the address; `application` is its name at the server; `seconds`:
        the longest time for one connection, and for one transaction.

        Raises StartupError naming the flag when the package is missing.
        """
        self._url, self._flag, self._schema, self._application = url, flag, schema, application
        self._seconds, self._shown = seconds, shown_url(url)
        try:
            import psycopg
        except ImportError as error:
            raise StartupError(
                f"{flag} {self._shown} needs the package psycopg: pip install 'penstock[postgres]'",
                flag=flag,
            ) from error
        self._psycopg = psycopg
        self._thread = WorkThread("database")
        # One transaction at a time: each has its time from where it begins.
        self._turn = asyncio.Lock()
        self._connection: Connection[Any] | None = None
        # The connection's socket once more, to be shut from the event loop.
        self._wire: socket.socket | None = None
        self._is_closed = False

    async def open(self) -> None:
        try:
            await self._bounded(self._make_tables)
        except (self._psycopg.Error, DatabaseFailed) as error:
            raise StartupError(f"{self._flag} {self._shown}: {error}", flag=self._flag) from error

    def _make_tables(self) -> None:
        connection = self._connected()
        with connection.transaction():
            connection.execute(f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})")
            for statement in self._schema:
                connection.execute(statement)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            # A server that does not answer has no claim on the process's end.
            self._cut()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._thread.run(self._drop)
            self._thread.close()

    async def run(self, work: Callable[[Rows], T]) -> T:
        try:
            return await self._bounded(lambda: self._transact(work))
        except self._psycopg.Error as error:
            raise DatabaseFailed(str(error)) from error

    async def _bounded(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread; the connection is cut when it takes too long, and `work` then fails.

        Raises DatabaseFailed, too, when those before it take as long: of many callers the last would wait for all.
        """
        try:
            async with asyncio.timeout(self._seconds):
                await self._turn.acquire()
        except TimeoutError:
            raise DatabaseFailed("those before it took too long") from None
        try:
            loop = asyncio.get_running_loop()
            timer: asyncio.TimerHandle

            def look() -> None:
                nonlocal timer
                self._cut()
                # It may have spent its time on the way to a connection.
                timer = loop.call_later(self._seconds, look)

            timer = loop.call_later(self._seconds, look)
            try:
                return await self._thread.run(work)
            finally:
                timer.cancel()
        finally:
            self._turn.release()

    def _cut(self) -> None:
        """Wake the thread from its wait for the server."""
        if self._wire is not None:
            with contextlib.suppress(OSError):
                self._wire.shutdown(socket.SHUT_RDWR)

    def _drop(self) -> None:
        """Close the connection, on the thread."""
        wire, self._wire = self._wire, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if wire is not None:
            wire.close()

    def _transact(self, work: Callable[[Rows], T]) -> T:
        if self._is_closed:
            raise DatabaseFailed("it is closed")
        connection = self._connected()
        try:
            with connection.transaction():
                return work(_PostgresRows(connection))
        except self._psycopg.OperationalError:
            # The next transaction makes a new one, whatever is wrong with this.
            self._drop()
            raise

    def _connected(self) -> Connection[Any]:
        if self._connection is None or self._connection.closed:
            self._drop()
            milliseconds, seconds = int(1000 * self._seconds), math.ceil(self._seconds)
            self._connection = self._psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=seconds,
                options=f"-c statement_timeout={milliseconds}",
                application_name=self._application,
                # Between transactions: an idle connection to a server that is gone ends before the next one.
                keepalives_idle=max(1, seconds // 2),
                keepalives_interval=max(1, seconds // (2 * _PROBES)),
                keepalives_count=_PROBES,
                tcp_user_timeout=milliseconds,
            )
            self._wire = socket.socket(fileno=os.dup(self._connection.fileno()))
            if self._is_closed:
                self._drop()
                raise DatabaseFailed("it is closed")
        return self._connection
