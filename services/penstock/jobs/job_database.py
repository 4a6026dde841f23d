"""Tables of files and batches, and the database that has them: SQLite for one gateway, PostgreSQL for several."""

from __future__ import annotations

from penstock.database.sqlite_database import SqliteDatabase
from penstock.database.transactions import Database, is_postgres
from penstock.jobs.job_options import JobOptions

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
    # Keys that the lines of live batches count for. A table of its own: older stores have none.
    "CREATE TABLE IF NOT EXISTS batch_keys (batch TEXT PRIMARY KEY, digest TEXT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS lines (
        batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, place BIGINT NOT NULL,
        bytes INTEGER NOT NULL, state INTEGER NOT NULL, holder TEXT, held_until DOUBLE PRECISION NOT NULL,
        answer BYTEA, PRIMARY KEY (batch, number), UNIQUE (batch, custom_id))""",
    "CREATE INDEX IF NOT EXISTS lines_by_state ON lines (batch, state, number)",
    "CREATE INDEX IF NOT EXISTS lines_in_turn ON lines (batch, state, held_until, number)",
    "CREATE INDEX IF NOT EXISTS lines_of_holder ON lines (holder)",
)
_FLAG = "--job-store"


def open_job_database(place: str, seconds: float = JobOptions.job_store_seconds) -> Database:
    """Make the database of `--job-store` without opening it. Raises StartupError naming the flag."""
    if is_postgres(place):
        from penstock.database.postgres_database import PostgresDatabase

        return PostgresDatabase(place, _FLAG, SCHEMA, "penstock-gateway", seconds=seconds)
    return SqliteDatabase(place, "jobs.sqlite", _FLAG, SCHEMA)
