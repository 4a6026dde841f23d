"""Interface of the databases that keep files and batches: transactions on one thread, in SQL that both speak.

`sqlite_jobs.py` is for one gateway, `postgres_jobs.py` for several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

# Types are PostgreSQL's; SQLite takes their affinity from the names.
SCHEMA = (
    """CREATE TABLE IF NOT EXISTS files (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, purpose TEXT NOT NULL, bytes BIGINT NOT NULL,
        created DOUBLE PRECISION NOT NULL, expires DOUBLE PRECISION NOT NULL, is_whole INTEGER NOT NULL,
        batch TEXT, state INTEGER)""",
    "CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner, created, id)",
    "CREATE INDEX IF NOT EXISTS files_of_batch ON files (batch)",
    """CREATE TABLE IF NOT EXISTS chunks (
        file TEXT NOT NULL, place BIGINT NOT NULL, data BYTEA NOT NULL, PRIMARY KEY (file, place))""",
    """CREATE TABLE IF NOT EXISTS batches (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, input_file TEXT NOT NULL, endpoint TEXT NOT NULL,
        time_window TEXT NOT NULL, state TEXT NOT NULL, created DOUBLE PRECISION NOT NULL,
        expires DOUBLE PRECISION NOT NULL, began DOUBLE PRECISION, cancelling DOUBLE PRECISION, ended DOUBLE PRECISION,
        total INTEGER NOT NULL, completed INTEGER NOT NULL, failed INTEGER NOT NULL, answer_bytes BIGINT NOT NULL,
        output_file TEXT, error_file TEXT, metadata TEXT NOT NULL, problems TEXT NOT NULL,
        holder TEXT, held_until DOUBLE PRECISION NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS batches_of_owner ON batches (owner, created, id)",
    "CREATE INDEX IF NOT EXISTS batches_by_state ON batches (state, created)",
    """CREATE TABLE IF NOT EXISTS lines (
        batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, place BIGINT NOT NULL,
        bytes INTEGER NOT NULL, state INTEGER NOT NULL, holder TEXT, held_until DOUBLE PRECISION NOT NULL,
        answer BYTEA, PRIMARY KEY (batch, number), UNIQUE (batch, custom_id))""",
    "CREATE INDEX IF NOT EXISTS lines_by_state ON lines (batch, state, number)",
    "CREATE INDEX IF NOT EXISTS lines_in_turn ON lines (batch, state, held_until, number)",
    "CREATE INDEX IF NOT EXISTS lines_of_holder ON lines (holder)",
)


class JobStoreFailed(Exception):
    """The database could not be reached, or failed; str() gives the reason."""


class Rows(Protocol):
    """Statements of one transaction. Values are written `?`."""

    def all(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement, and return its rows."""

    def change(self, statement: str, *values: Any) -> int:
        """Run a statement, and return the number of rows that it changed."""

    def change_many(self, statement: str, values: list[tuple[Any, ...]]) -> None:
        """Run a statement for each tuple of values."""


class JobDatabase(Protocol):
    """Transactions, one at a time, on a thread of their own."""

    # Clause by which a query that claims rows passes over those that another transaction claims.
    skip_claimed: str
    # Clause by which a query holds its rows until the transaction's end.
    lock: str
    # True: no other process uses it, so that whatever is claimed at the start is left over from an earlier one.
    is_own: bool

    async def open(self) -> None:
        """Make the tables where they are missing. Raises StartupError naming --job-store."""

    async def close(self) -> None:
        """Close it. A second call does nothing."""

    async def run(self, work: Callable[[Rows], T]) -> T:
        """Run `work` as one transaction: all of it, or, when it raises, nothing. Raises JobStoreFailed."""
