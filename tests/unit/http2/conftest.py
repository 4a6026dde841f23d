"""Both event loops: what Penstock's HTTP/2 does must hold on either."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

# TLS is asyncio's alone, and so are the turns in which a listener begins connections.
_ASYNCIOS = ("test_listener.py", "test_metered_tls.py")


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the loops that a test runs on, each by the name that its id gets."""
    own = {"asyncio": asyncio.new_event_loop}
    return own if item.path.name in _ASYNCIOS else {**own, "uvloop": uvloop.new_event_loop}
