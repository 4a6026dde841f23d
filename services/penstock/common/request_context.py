"""Metadata of calls with a meaning in Penstock, and the request id of the call being handled, for the logs and for
calls made from it."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

REQUEST_ID_KEY = "x-request-id"
# In an operator's call to a router: the backend that it is for.
BACKEND_KEY = "penstock-backend"
_WELL_FORMED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")

current_request_id: ContextVar[str | None] = ContextVar("penstock_request_id", default=None)


def new_request_id() -> str:
    """Make a request id of 32 hex digits."""
    return secrets.token_hex(16)


def accept_request_id(given: str | bytes | None) -> str:
    """Return `given` if it is short and has only harmless characters, else a new id: ids go into logs."""
    return given if isinstance(given, str) and is_request_id(given) else new_request_id()


def is_request_id(given: str) -> bool:
    """True for an id that may stand in logs and headers: short, with only harmless characters."""
    return _WELL_FORMED.fullmatch(given) is not None
