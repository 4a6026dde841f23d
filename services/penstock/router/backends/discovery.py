"""Addresses of configured targets: a name may stand for several, and they may change.

Names of hosts are looked up in DNS again and again. Kubernetes services are watched.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from penstock.common.addresses import join_address
from penstock.common.environment import current_environment
from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.router.backend_targets import KubernetesService, is_address, service_of, split_target
from penstock.router.config import RouterConfig
from penstock.router.kubernetes.cluster_api import find_api
from penstock.router.kubernetes.endpoint_watch import EndpointWatch

_log = get_logger("penstock.router")


@dataclass(frozen=True, slots=True)
class BackendAddress:
    """Address of a backend, and the configured target that it came from (a closed set, so usable as a label)."""

    address: str
    target: str


Resolver = Callable[[Iterable[str]], Awaitable[dict[str, set[BackendAddress]]]]


class Discovery:
    """Addresses of targets that may change. Belongs to one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        resolver: Resolver,
        *,
        on_change: Callable[[], None],
        spawn: Callable[[Awaitable[None]], asyncio.Task[None]],
    ) -> None:
        """Make it. `resolver`: of names in DNS. `on_change`: ask again. `spawn`: runs a task that must not end."""
        self._config = config
        self._resolver = resolver
        self._on_change = on_change
        self._spawn = spawn
        self._watches: dict[str, tuple[EndpointWatch, asyncio.Task[None]]] = {}

    async def find(self, targets: Iterable[str]) -> dict[str, set[BackendAddress]]:
        """Return the addresses of each target. One that has none now is left out: its last ones stay in use."""
        services = {target: service for target in targets if (service := service_of(target)) is not None}
        self._watch(services)
        found = await self._resolver([target for target in targets if target not in services])
        for target, (watch, _) in self._watches.items():
            if watch.addresses:
                found[target] = {BackendAddress(address, target) for address in watch.addresses}
        return found

    async def close(self) -> None:
        """End the watches."""
        tasks = [task for _, task in self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _watch(self, services: dict[str, KubernetesService]) -> None:
        """Watch these services, and no others."""
        for target in self._watches.keys() - services.keys():
            self._watches.pop(target)[1].cancel()
        for target in services.keys() - self._watches.keys():
            try:
                api = find_api(self._config, current_environment(), target)
            except StartupError as error:
                # Of a file of models that changed: what runs goes on. At the start check_services has told it.
                _log.error("a service cannot be watched", backend=target, cause=error.message)
                continue
            watch = EndpointWatch(services[target], api, self._config, self._on_change)
            self._watches[target] = watch, self._spawn(watch.run())


def check_services(config: RouterConfig, targets: Iterable[str]) -> None:
    """Check that services among `targets` can be watched from here. Raises StartupError naming the flag."""
    for target in targets:
        if service_of(target) is not None:
            find_api(config, current_environment(), target)


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
