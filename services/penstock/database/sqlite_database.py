"""Database of SQLite: a file of one process, or of several on one machine, or a temporary one."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from penstock.common.errors import StartupError
from penstock.database.transactions import TEMPORARY, DatabaseFailed, Rows
from penstock.database.work_thread import WorkThread

T = TypeVar("T")
# Seconds that a transaction waits for one of another process.
_WAIT_SECONDS = 10.0


class _SqliteRows:
    """Rows of SQLite."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def all(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._db.execute(statement, values).fetchall()

    def change(self, statement: str, *values: Any) -> int:
        return self._db.execute(statement, values).rowcount

    def change_many(self, statement: str, values: list[tuple[Any, ...]]) -> None:
        self._db.executemany(statement, values)


@contextmanager
def _alone(path: str) -> Iterator[None]:
    """Hold a lock among processes during the block: SQLite refuses the second of two that make a file's tables."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class SqliteDatabase:
    """Database on SQLite. What a transaction wrote survives the end of the process, however it ends."""

    skip_claimed = lock = ""

    def __init__(
        self, place: str, file_name: str, flag: str, schema: Sequence[str], *, is_shared: bool = False
    ) -> None:
        """Make it without a file. `place`: a folder for `file_name`, or `temporary`; `flag` named it.

        `is_shared`: other processes of this machine may have it open, too.
        """
        self._place, self._file_name, self._flag, self._schema = place, file_name, flag, schema
        self.is_own = not is_shared
        self._thread = WorkThread("database")
        self._db: sqlite3.Connection | None = None

    async def open(self) -> None:
        try:
            await self._thread.run(self._open)
        except (OSError, sqlite3.Error) as error:
            raise StartupError(f"{self._flag} {self._place}: {error}", flag=self._flag) from error

    def _open(self) -> None:
        if self._place == TEMPORARY:
            # SQLite's own temporary file: it has no name, and the system removes it with the process.
            path = ""
        else:
            folder = Path(self._place).expanduser()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = str(folder / self._file_name)
            # Prompts, answers and figures of callers are private.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        wait = 0.0 if self.is_own else _WAIT_SECONDS
        with nullcontext() if self.is_own else _alone(f"{path}.lock"):
            self._db = self._connected(path, wait)

    def _connected(self, path: str, wait: float) -> sqlite3.Connection:
        db = sqlite3.connect(path, check_same_thread=False, timeout=wait, isolation_level=None)
        if self.is_own:
            # A second process would take what this one has claimed.
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        # Deleted data is overwritten.
        db.execute("PRAGMA secure_delete = ON")
        db.execute("BEGIN IMMEDIATE")
        for statement in self._schema:
            db.execute(statement)
        db.execute("COMMIT")
        return db

    async def close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            await self._thread.run(db.close)
        self._thread.close()

    async def run(self, work: Callable[[Rows], T]) -> T:
        """A full disk is a DatabaseFailed."""
        try:
            return await self._thread.run(lambda: self._transact(work))
        except sqlite3.Error as error:
            raise DatabaseFailed(str(error)) from error

    def _transact(self, work: Callable[[Rows], T]) -> T:
        if self._db is None:
            raise DatabaseFailed("it is closed")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            result = work(_SqliteRows(self._db))
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        return result
