"""Interface of the databases: transactions on one thread, in SQL that SQLite and PostgreSQL both speak.

Types in schemas are PostgreSQL's; SQLite takes their affinity from the names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")
# Place of a database that ends with its process.
TEMPORARY = "temporary"


class DatabaseFailed(Exception):
    """The database could not be reached, or failed; str() gives the reason."""


class Rows(Protocol):
    """Statements of one transaction. Values are written `?`."""

    def all(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement, and return its rows."""

    def change(self, statement: str, *values: Any) -> int:
        """Run a statement, and return the number of rows that it changed."""

    def change_many(self, statement: str, values: list[tuple[Any, ...]]) -> None:
        """Run a statement for each tuple of values."""


class Database(Protocol):
    """Transactions, one at a time, on a thread of their own."""

    # Clause by which a query that claims rows passes over those that another transaction claims.
    skip_claimed: str
    # Clause by which a query holds its rows until the transaction's end.
    lock: str
    # True: no other process uses it, so that whatever is claimed at the start is left over from an earlier one.
    is_own: bool

    async def open(self) -> None:
        """Make the tables where they are missing. Raises StartupError naming the flag."""

    async def close(self) -> None:
        """Close it. A second call does nothing."""

    async def run(self, work: Callable[[Rows], T]) -> T:
        """Run `work` as one transaction: all of it, or, when it raises, nothing. Raises DatabaseFailed."""


def is_postgres(place: str) -> bool:
    """True when `place` is the address of a database of PostgreSQL."""
    return urlsplit(place).scheme in ("postgresql", "postgres")
