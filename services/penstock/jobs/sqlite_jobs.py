"""Files and batches of one gateway: a database of SQLite in a folder, or a temporary one."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from penstock.common.errors import StartupError
from penstock.jobs.job_database import SCHEMA, JobStoreFailed, Rows
from penstock.jobs.job_options import TEMPORARY

T = TypeVar("T")
FILE_NAME = "jobs.sqlite"


class _SqliteRows:
    """Rows of SQLite."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def all(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """See Rows."""
        return self._db.execute(statement, values).fetchall()

    def change(self, statement: str, *values: Any) -> int:
        """See Rows."""
        return self._db.execute(statement, values).rowcount

    def change_many(self, statement: str, values: list[tuple[Any, ...]]) -> None:
        """See Rows."""
        self._db.executemany(statement, values)


class SqliteJobs:
    """JobDatabase on SQLite. Written answers survive the end of the process, however it ends."""

    skip_claimed = lock = ""
    is_own = True

    def __init__(self, place: str) -> None:
        """Make it without a file. `place`: a folder, or `temporary`."""
        self._place = place
        self._thread = ThreadPoolExecutor(1, "job-store")
        self._db: sqlite3.Connection | None = None

    async def open(self) -> None:
        """See JobDatabase."""
        try:
            await self._do(self._open)
        except (OSError, sqlite3.Error) as error:
            raise StartupError(f"--job-store {self._place}: {error}", flag="--job-store") from error

    def _open(self) -> None:
        if self._place == TEMPORARY:
            # SQLite's own temporary file: it has no name, and the system removes it with the process.
            path = ""
        else:
            folder = Path(self._place).expanduser()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = str(folder / FILE_NAME)
            # Prompts and answers are private.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        db = sqlite3.connect(path, check_same_thread=False, timeout=0.0, isolation_level=None)
        # A second gateway would take lines that this one has.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        # Deleted data is overwritten.
        db.execute("PRAGMA secure_delete = ON")
        db.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA:
            db.execute(statement)
        db.execute("COMMIT")
        self._db = db

    async def close(self) -> None:
        """See JobDatabase."""
        db, self._db = self._db, None
        if db is not None:
            await self._do(db.close)
        self._thread.shutdown(wait=False)

    async def run(self, work: Callable[[Rows], T]) -> T:
        """See JobDatabase. A full disk is a JobStoreFailed."""
        try:
            return await self._do(lambda: self._transact(work))
        except sqlite3.Error as error:
            raise JobStoreFailed(str(error)) from error

    async def _do(self, work: Callable[[], T]) -> T:
        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        except RuntimeError as error:
            raise JobStoreFailed("it is closed") from error
        return await running

    def _transact(self, work: Callable[[Rows], T]) -> T:
        if self._db is None:
            raise JobStoreFailed("it is closed")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            result = work(_SqliteRows(self._db))
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        return result
