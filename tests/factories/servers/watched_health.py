"""Health service that reports when it is watched."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from grpc_health.v1._async import HealthServicer


class WatchedHealth(HealthServicer):
    """Servicer that awaits `on_watch` before a watch begins."""

    def __init__(self, on_watch: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._on_watch = on_watch

    async def Watch(self, request: Any, context: Any) -> None:
        await self._on_watch()
        await super().Watch(request, context)
