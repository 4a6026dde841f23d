"""Head of a request: rules of RFC 9112 that httptools does not have, and the names that the gateway may be called by.

Rules: 3.2 (Host), 6.1 (Transfer-Encoding), 7.4 (TE).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Iterable

from penstock.common.config import is_loopback
from penstock.gateway.errors import HttpError

# Host as RFC 9112 (3.2) and RFC 3986 (3.2.2) have it, less what no name of a server has: name or address, and port.
_FORM = re.compile(rb"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~-]*)(?::[0-9]*)?", re.ASCII)
# The same length: nothing moves.
_UPGRADE, _NO_UPGRADE = re.compile(rb"\nupgrade:", re.IGNORECASE), b"\nx-asked:"


def host_name(header: bytes) -> str | None:
    """Return the name of a Host field in small letters, without its port; None where it is no such field."""
    found = _FORM.fullmatch(header)
    return None if found is None else found["name"].decode("ascii").lower().rstrip(".")


def without_upgrade(data: bytes) -> tuple[bytes, bytes]:
    """Return what a parser is given first of bytes that begin in a head, and the rest.

    Nothing but HTTP/1.1 is spoken, and Upgrade may be ignored (RFC 9110, 7.8). httptools would take what follows such a
    head for another protocol, the body as well; clients that could speak HTTP/2 send it with every first request.
    """
    if _UPGRADE.search(data) is None:
        return data, b""
    end = data.find(b"\r\n\r\n")
    size = len(data) if end < 0 else end + 4
    return _UPGRADE.sub(_NO_UPGRADE, data[:size]), data[size:]


def check_head(version: str, headers: Iterable[tuple[bytes, bytes]]) -> HttpError | None:
    """Return the error of a head whose fields are wrong; None for a good one. Names are in small letters."""
    hosts, codings, lengths, wrong = 0, 0, 0, ""
    for name, value in headers:
        if name == b"host":
            hosts += 1
            if host_name(value.strip()) is None:
                wrong = "Host is no name or address"
        elif name == b"transfer-encoding":
            codings += 1
            if value.strip().lower() != b"chunked":
                wrong = "Transfer-Encoding must be chunked"
        elif name == b"content-length":
            lengths += 1
        elif name == b"te" and b"chunked" in value.lower():
            wrong = "TE must not name chunked, which goes without saying"
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        wrong = "Host must be there once"
    elif codings and (codings > 1 or lengths or version != "1.1"):
        wrong = "Transfer-Encoding must be there once, without Content-Length, in HTTP/1.1"
    return HttpError(400, wrong, reason="MALFORMED_REQUEST") if wrong else None


def foreign_host() -> HttpError:
    """Error of a request without a token by a name that is not trusted."""
    return HttpError(421, "Host is no name of this gateway (--allowed-hosts adds one)", reason="HOST_NOT_ALLOWED")


class TrustedHosts:
    """Names that requests may come by which show no credentials.

    Where no token is asked for, a browser is the way in: a page at a name of the attacker's, which it then lets point
    to this machine, is of the same origin as the gateway (DNS rebinding). An address cannot be made to point elsewhere.
    """

    def __init__(self, host: str, allowed: Collection[str]) -> None:
        """Make it. `host`: that of --host. `allowed`: names of --allowed-hosts; * is any."""
        self._is_any = "*" in allowed
        # Nobody beyond a network can have a name without a dot; networks of containers call each other so.
        self._takes_short = not is_loopback(host)
        self._names = {name.lower().strip("[]").rstrip(".") for name in (host, socket.gethostname(), *allowed)}

    def accepts(self, header: bytes | None) -> bool:
        """True for this machine's own names, addresses, and the names that are listed."""
        if self._is_any:
            return True
        name = host_name(header or b"")
        if not name:
            return False
        name = name.strip("[]")
        if name in self._names or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return self._takes_short and "." not in name
        return True
