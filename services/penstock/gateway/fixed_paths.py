"""Requests for paths without a variable part go to their endpoint at once; all others take Starlette's way, which costs
a request as much as reading its body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

AsgiApp = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class FixedPaths:
    """ASGI application before another one."""

    def __init__(self, endpoints: Mapping[tuple[str, str], AsgiApp], others: AsgiApp) -> None:
        """Make it. `endpoints`: by method and path. `others`: the application for all other requests."""
        self._endpoints, self._others = endpoints, others

    def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> Awaitable[None]:
        """Answer a request."""
        return self._endpoints.get((scope["method"], scope["path"]), self._others)(scope, receive, send)
