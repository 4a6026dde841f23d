"""The database of a ledger: SQLite for the routers of one machine, PostgreSQL for those of several."""

from __future__ import annotations

from penstock.database.transactions import TEMPORARY, Database, is_postgres
from penstock.router.key_options import KeyOptions
from penstock.router.keys.ledger_tables import SCHEMA

_FLAG = "--ledger"


def open_ledger_database(options: KeyOptions) -> Database:
    """Make the database of `--ledger` without opening it. Raises StartupError naming the flag."""
    place = options.ledger
    if is_postgres(place):
        from penstock.database.postgres_database import PostgresDatabase

        return PostgresDatabase(place, _FLAG, SCHEMA, "penstock-router", seconds=options.ledger_seconds)
    # sqlite3 is imported only where there are keys.
    from penstock.database.sqlite_database import SqliteDatabase

    return SqliteDatabase(place, "ledger.sqlite", _FLAG, SCHEMA, is_shared=place != TEMPORARY)
