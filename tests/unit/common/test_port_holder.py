"""Name of the process that listens on a port, on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from penstock.common.addresses import PortTaken, require_free_port
from penstock.common.port_holder import port_holder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LISTEN = """
import socket, sys
taken = socket.create_server((sys.argv[-1], 0), family=socket.AF_INET6 if ":" in sys.argv[-1] else socket.AF_INET)
print(taken.getsockname()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def listener(*arguments: str) -> Iterator[tuple[int, int]]:
    """Run a process that listens, with `arguments` in its command line; yield its port and id."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin:
        yield int(process.stdout.readline()), process.pid


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0"])
def test_a_program_is_named_without_its_arguments(host: str) -> None:
    with listener("--token", "secret", host) as (port, pid):
        holder = port_holder(port)
        assert holder is not None
        assert holder.endswith(f" (process {pid})")
        assert "secret" not in holder


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("penstock.cli.main", "serve", "router", "--port", "0"), "penstock serve router"),
        (("/opt/bin/penstock", "serve", "--auth-token-file", "secret"), "penstock serve"),
        (("/opt/bin/penstock", "--secret", "secret"), "penstock"),
    ],
)
def test_penstock_is_named_by_its_command(arguments: tuple[str, ...], name: str) -> None:
    with listener(*arguments, "127.0.0.1") as (port, pid):
        assert port_holder(port) == f"{name} (process {pid})"


def test_nobody_holds_a_port_that_no_socket_listens_on() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert port_holder(bound.getsockname()[1]) is None


def test_the_error_of_a_taken_port_says_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"^port {port} on 127\.0\.0\.1 is taken by .* \(process {os.getpid()}\)$"):
            require_free_port("127.0.0.1", port, "--port")
