"""Server of PostgreSQL for stores that several gateways share: a real one on a free port, which flushes nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_USER = "postgres"
# Where Debian has them.
_PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
_INITDB = shutil.which("initdb") or next((str(one / "initdb") for one in _PROGRAMS[::-1]), None)
has_postgres = _INITDB is not None and Path(_INITDB).exists() and importlib.util.find_spec("psycopg") is not None
needs_postgres = pytest.mark.skipif(
    not has_postgres, reason="no PostgreSQL, or no psycopg; last run recorded in docs/learn/testing.md"
)
_numbers = itertools.count()


class Postgres:
    """A running server."""

    def __init__(self, port: int) -> None:
        self._port = port

    def database(self) -> str:
        """Make an empty database; return its address, for --job-store."""
        import psycopg

        name = f"jobs_{os.getpid()}_{next(_numbers)}"
        with psycopg.connect(self._url(_USER), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self._url(name)

    def disconnect_all(self) -> None:
        """End every connection, as a restart of the server does."""
        import psycopg

        with psycopg.connect(self._url(_USER), autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                "AND application_name = 'penstock-gateway'"
            )

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Stop the processes that serve connections: they stay open, and nobody answers."""
        import psycopg

        with psycopg.connect(self._url(_USER), autocommit=True) as connection:
            rows = connection.execute(
                "SELECT pid FROM pg_stat_activity WHERE application_name = 'penstock-gateway'"
            ).fetchall()
        stopped = [int(pid) for (pid,) in rows]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)

    def _url(self, database: str) -> str:
        return f"postgresql://{_USER}@127.0.0.1:{self._port}/{database}"


@contextlib.contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Run a server. It refuses to be root's, so root gives it to the user of Debian's package."""
    assert _INITDB is not None
    programs = Path(_INITDB).resolve().parent
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="penstock-postgres-") as made:
        folder = Path(made)
        as_user: dict[str, Any] = {"cwd": "/"}
        if os.geteuid() == 0:
            shutil.chown(folder, _USER)
            as_user["user"] = _USER
        data = folder / "data"
        subprocess.run(
            [programs / "initdb", "--pgdata", data, "--username", _USER, "--auth", "trust", "--no-sync"],
            check=True, capture_output=True, **as_user,
        )  # fmt: skip
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off", "port": port}
        command = [str(programs / "postgres"), "-D", str(data)]
        command += [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, **as_user)
        try:
            assert process.stderr is not None
            said = iter(process.stderr.readline, b"")
            assert any(b"ready to accept connections" in line for line in said), "the server ended"
            yield Postgres(port)
        finally:
            process.kill()
            process.communicate()
