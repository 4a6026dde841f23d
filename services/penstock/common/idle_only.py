"""Requests that use idle capacity only: the metadata that asks for it, and the tenant that all of them are."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar

# In a call to a router, with the value 1: it waits, and rests, while a request without it is there.
IDLE_ONLY_KEY = "penstock-idle-only"
# Tenant of such requests, at router and engine alike. No digest of a token is like it.
IDLE_TENANT = "idle-only"
# True: the calls made from this one use idle capacity only.
is_idle_only: ContextVar[bool] = ContextVar("penstock_idle_only", default=False)


def asks_for_idle_only(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """True for the metadata of a call that uses idle capacity only."""
    return dict(metadata or ()).get(IDLE_ONLY_KEY) == "1"
