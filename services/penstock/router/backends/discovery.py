"""Resolution of configured `host:port` targets to addresses; a name may stand for several, and they may change."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.common.addresses import join_address
from penstock.common.logging import get_logger
from penstock.router.config import is_address, split_target

_log = get_logger("penstock.router")


@dataclass(frozen=True, slots=True)
class BackendAddress:
    """Address of a backend, and the configured target that it came from (a closed set, so usable as a label)."""

    address: str
    target: str


async def resolve(targets: Iterable[str]) -> dict[str, set[BackendAddress]]:
    """Resolve each target. A name that cannot be resolved now is left out: its last addresses stay in use."""
    found: dict[str, set[BackendAddress]] = {}
    for target in targets:
        addresses = await _addresses(target)
        if addresses:
            found[target] = {BackendAddress(address, target) for address in addresses}
    return found


async def _addresses(target: str) -> list[str]:
    host, port = split_target(target, "--backend")
    if is_address(host):
        return [join_address(host, port)]
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        # UnicodeError: DNS cannot hold such a name.
        _log.warning("cannot resolve a backend name", backend=target, errno=getattr(error, "errno", None))
        return []
    # A name with both families usually names the same process twice: keep one family.
    families = {info[0] for info in infos}
    family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return [join_address(str(info[4][0]), port) for info in infos if info[0] == family]
