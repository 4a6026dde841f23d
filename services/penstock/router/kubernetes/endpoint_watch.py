"""Watch of one Kubernetes service: its ready endpoints, kept up to date by the API's list and watch."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from penstock.common.logging import get_logger
from penstock.router.backend_targets import KubernetesService
from penstock.router.config import RouterConfig
from penstock.router.kubernetes.api_call import ApiError, get
from penstock.router.kubernetes.cluster_api import ClusterApi
from penstock.router.kubernetes.endpoint_slices import ready_addresses, slices_path

_log = get_logger("penstock.router")
# Seconds for a list, and beyond the length of a watch.
_ANSWER_SECONDS = 10.0
_GONE = 410


class EndpointWatch:
    """Addresses of a service's ready endpoints. They outlive losses of the API."""

    def __init__(
        self, service: KubernetesService, api: ClusterApi, config: RouterConfig, on_change: Callable[[], None]
    ) -> None:
        """Make it; `run` reads. `on_change`: the addresses are others."""
        self._service = service
        self._api = api
        self._config = config
        self._on_change = on_change
        self._path = slices_path(service, api.namespace())
        # By name, as the API has them.
        self._slices: dict[str, Mapping[str, Any]] = {}
        self.addresses: tuple[str, ...] = ()

    async def run(self) -> None:
        """List, then watch, until cancelled. A failure is logged and tried again, ever more slowly."""
        shortest, longest = self._config.reconnect_min_seconds, self._config.kubernetes_retry_seconds
        wait = shortest
        while True:
            try:
                version = await self._list()
                while True:
                    version = await self._watch(version)
                    wait = shortest
                    # An API that ends every watch at once must not be asked in a loop.
                    await asyncio.sleep(wait)
            except ApiError as error:
                if error.status != _GONE:
                    _log.warning("cannot read a service's endpoints", service=self._shown, cause=str(error))
            except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
                _log.warning("a service's endpoints make no sense", service=self._shown, cause=type(error).__name__)
            # Routers that lost the API together must not come back together.
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, longest)

    @property
    def _shown(self) -> str:
        return f"{self._service.namespace or self._api.namespace()}/{self._service.name}"

    async def _list(self) -> str:
        """Read all slices, and return the version that a watch goes on from. Raises ApiError, ValueError."""
        limit = self._config.max_endpoints_bytes
        async with get(self._api, self._path, seconds=_ANSWER_SECONDS, max_bytes=limit) as answer:
            found = json.loads(await answer.read())
        self._slices = {one["metadata"]["name"]: one for one in found.get("items") or ()}
        self._use()
        return str(found["metadata"]["resourceVersion"])

    async def _watch(self, version: str) -> str:
        """Follow changes until the API ends the watch, and return the last version. Raises ApiError, ValueError."""
        seconds = self._config.kubernetes_watch_seconds
        path = f"{self._path}&watch=1&allowWatchBookmarks=true&resourceVersion={version}&timeoutSeconds={seconds:.0f}"
        limit = self._config.max_endpoints_bytes
        async with get(self._api, path, seconds=seconds + _ANSWER_SECONDS, max_bytes=limit) as answer:
            async for line in answer.lines():
                event = json.loads(line)
                kind, item = event["type"], event["object"]
                if kind == "ERROR":
                    raise ApiError(str(item.get("message") or "no reason given"), int(item.get("code") or 0))
                version = str(item["metadata"]["resourceVersion"])
                if kind == "BOOKMARK":
                    continue
                name = item["metadata"]["name"]
                if kind == "DELETED":
                    self._slices.pop(name, None)
                else:
                    self._slices[name] = item
                self._use()
        return version

    def _use(self) -> None:
        found = ready_addresses(self._slices.values(), self._service)
        if found != self.addresses:
            self.addresses = found
            self._on_change()
