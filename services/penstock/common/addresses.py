"""Addresses of servers: their written form, and a check that a port is free."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from penstock.common.errors import StartupError
from penstock.common.port_holder import port_holder


@dataclass(frozen=True)
class BoundAddresses:
    """Addresses at which a process answers, each `host:port`; `metrics` is None without a metrics endpoint.

    `grpc` is the address of the service itself; the gateway's speaks HTTP.
    """

    grpc: str
    metrics: str | None


class PortTaken(StartupError):
    """Another process listens on a port; the text names it where it is found."""

    def __init__(self, host: str, port: int, flag: str) -> None:
        holder = port_holder(port)
        super().__init__(f"port {port} on {host} is taken{f' by {holder}' if holder else ''}", flag=flag)


def join_address(host: str, port: int) -> str:
    """Join to `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def require_free_port(host: str, port: int, flag: str) -> None:
    """Check that a server can listen there; port 0 is always free.

    Raises PortTaken naming `flag`, or StartupError naming it or --host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(host, port, flag) from error
        wrong = flag if error.errno == errno.EACCES else "--host"
        raise StartupError(f"cannot listen on {join_address(host, port)}: {error.strerror}", flag=wrong) from error
