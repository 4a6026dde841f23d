"""Access of handlers to what the gateway keeps: the store, its failures as callers' errors, pages of items."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.common.errors import FailedPrecondition, InvalidArgument, Unavailable
from penstock.common.logging import get_logger
from penstock.gateway.answers import dumps
from penstock.gateway.endpoint import HttpCall
from penstock.gateway.file_routes import limit_of, page_of, query_of
from penstock.gateway.kept_stores import KeptStores
from penstock.gateway.response_store import StoreFailed

_LISTED, _MOST_LISTED = 20, 100
_log = get_logger("penstock.gateway")


def kept_of(call: HttpCall) -> KeptStores:
    """Return the stores of a call. Raises FailedPrecondition when there are none."""
    if call.kept is None:
        raise FailedPrecondition("this gateway keeps no responses (--response-store)", reason="RESPONSE_STORE_OFF")
    return call.kept


@contextmanager
def asking_store() -> Iterator[None]:
    """Turn a store's failure into the caller's error."""
    try:
        yield
    except StoreFailed as error:
        _log.error("the store of responses failed", error=str(error))
        raise Unavailable(
            "the store of responses does not answer: try again, or send all items", reason="RESPONSE_STORE_DOWN"
        ) from error


def items_page(items: list[dict[str, Any]], call: HttpCall) -> bytes:
    """Return one page of items, the last first unless the call asks otherwise. Raises InvalidArgument."""
    asked = query_of(call)
    order, limit = asked.get("order", "desc"), limit_of(asked, _LISTED, _MOST_LISTED)
    if order not in ("asc", "desc"):
        raise InvalidArgument("order", "must be asc or desc")
    found = items if order == "asc" else items[::-1]
    if (after := asked.get("after")) is not None:
        places = [number for number, item in enumerate(found) if item["id"] == after]
        if not places:
            raise InvalidArgument("after", "must be the id of one of the items")
        found = found[places[0] + 1 :]
    shown: list[Any] = found[:limit]
    return dumps(page_of(shown, has_more=len(shown) < len(found)))
