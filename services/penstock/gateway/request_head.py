"""Head of a request: rules of RFC 9112 that httptools does not check, and the allowed names of the gateway.

Rules: 3.2 (Host), 6.1 (Transfer-Encoding), 7.4 (TE).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Iterable

from penstock.common.config import is_loopback
from penstock.gateway.http_errors import HttpError

# Host by RFC 9112 (3.2) and RFC 3986 (3.2.2), without characters that no server's name has: name or address, and port.
_FORM = re.compile(rb"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~-]*)(?::[0-9]*)?", re.ASCII)
# The same length, so nothing moves.
_UPGRADE, _NO_UPGRADE = re.compile(rb"\nupgrade:", re.IGNORECASE), b"\nx-asked:"

# Accepted Host fields that are remembered, and the longest of them.
_MOST_ACCEPTED, _MOST_ACCEPTED_BYTES = 64, 256


def host_name(header: bytes) -> str | None:
    """Return the name of a Host field in lower case, without its port; None if the field is not valid."""
    found = _FORM.fullmatch(header)
    return None if found is None else found["name"].decode("ascii").lower().rstrip(".")


def without_upgrade(data: bytes) -> tuple[bytes, bytes]:
    """Split bytes that begin in a head into the part that the parser gets first, and the rest.

    The gateway speaks only HTTP/1.1, and Upgrade may be ignored (RFC 9110, 7.8). httptools would treat everything after
    such a head, the body included, as another protocol; clients that speak HTTP/2 send it with every first request.
    """
    if _UPGRADE.search(data) is None:
        return data, b""
    end = data.find(b"\r\n\r\n")
    size = len(data) if end < 0 else end + 4
    return _UPGRADE.sub(_NO_UPGRADE, data[:size]), data[size:]


def check_head(version: str, headers: Iterable[tuple[bytes, bytes]]) -> HttpError | None:
    """Return the error of a head with wrong fields; None for a valid one. Names are in lower case."""
    hosts, codings, lengths, wrong = 0, 0, 0, ""
    for name, value in headers:
        if name == b"host":
            hosts += 1
            if _FORM.fullmatch(value.strip()) is None:
                wrong = "Host is not a name or address"
        elif name == b"transfer-encoding":
            codings += 1
            if value.strip().lower() != b"chunked":
                wrong = "Transfer-Encoding must be chunked"
        elif name == b"content-length":
            lengths += 1
        elif name == b"te" and b"chunked" in value.lower():
            wrong = "TE must not name chunked, which is always accepted"
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        wrong = "Host must occur once"
    elif codings and (codings > 1 or lengths or version != "1.1"):
        wrong = "Transfer-Encoding must occur once, without Content-Length, in HTTP/1.1"
    return HttpError(400, wrong, reason="MALFORMED_REQUEST") if wrong else None


def has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """True where a head says that a body follows. Names are in lower case."""
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in headers)


def is_chunked(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """True for a body in chunks, by the fields of a valid head."""
    return b"transfer-encoding" in dict(headers)


def foreign_host() -> HttpError:
    """Error of a request without a token under a name that is not trusted."""
    return HttpError(421, "Host is not a name of this gateway (--allowed-hosts adds one)", reason="HOST_NOT_ALLOWED")


class TrustedHosts:
    """Names that requests without credentials may use.

    Without tokens, a browser is the way in: an attacker serves a page under a name, then points that name at this
    machine, so the page has the same origin as the gateway (DNS rebinding). An address cannot be redirected.
    """

    def __init__(self, host: str, allowed: Collection[str]) -> None:
        """Make it. `host`: the address of --host. `allowed`: names of --allowed-hosts; * is any."""
        self._is_any = "*" in allowed
        # Nobody outside a network can have a name without a dot; containers in a network use such names.
        self._takes_short = not is_loopback(host)
        self._names = {name.lower().strip("[]").rstrip(".") for name in (host, socket.gethostname(), *allowed)}
        # Fields that were accepted: most requests have one of a few.
        self._accepted: set[bytes] = set()

    def accepts(self, header: bytes | None) -> bool:
        """True for this machine's own names, addresses, and the listed names."""
        if self._is_any or header in self._accepted:
            return True
        if header is None or not self._judge(header):
            return False
        if len(self._accepted) >= _MOST_ACCEPTED:
            self._accepted.clear()
        if len(header) <= _MOST_ACCEPTED_BYTES:
            self._accepted.add(header)
        return True

    def _judge(self, header: bytes) -> bool:
        name = host_name(header)
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
