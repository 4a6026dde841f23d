"""Interface of the stores of /v1/responses' answers for callers to build on. Two stores have it: for one gateway
(sqlite_responses.py) and for several (redis_responses.py)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

MEMORY = "memory"


class StoreFailed(Exception):
    """The store could not be reached, or failed; str() gives the reason."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the items of its own request; earlier turns have theirs."""

    response: dict[str, Any]
    input: list[dict[str, Any]]

    @property
    def response_id(self) -> str:
        """Its id."""
        return str(self.response["id"])


class ResponseStore(Protocol):
    """Store of responses, limited in number, bytes and time. A caller sees only its own.

    All but open and close raise StoreFailed.
    """

    @property
    def num_responses(self) -> int:
        """Number of responses at the last write."""

    @property
    def num_bytes(self) -> int:
        """Bytes of responses at the last write."""

    async def open(self) -> None:
        """Connect to the store. Raises StartupError if no later try can succeed."""

    async def close(self) -> None:
        """Close it. A second call does nothing."""

    async def put(self, caller: str, stored: StoredResponse, previous: str | None) -> None:
        """Keep a response; the oldest go when there are too many."""

    async def replace(self, caller: str, stored: StoredResponse, previous: str | None) -> bool:
        """Write a kept response anew, as old as it was; False if the caller has none with its id any more."""

    async def get(self, caller: str, response_id: str) -> StoredResponse | None:
        """Return a response; None if the caller has none with this id."""

    async def chain(self, caller: str, response_id: str, max_bytes: int) -> list[StoredResponse] | None:
        """Return a response and all those that it builds on, oldest first; None if one of them is missing.

        Raises OverflowError when they have more than `max_bytes` bytes of JSON.
        """

    async def delete(self, caller: str, response_id: str) -> bool:
        """Delete a response of the caller's; False if there is none."""


def encode_response(stored: StoredResponse) -> tuple[bytes, bytes]:
    """Return the JSON of a response's input and of itself; a lone surrogate becomes a question mark."""
    given, response = (
        json.dumps(one, ensure_ascii=False).encode("utf-8", "replace") for one in (stored.input, stored.response)
    )
    return given, response


def check_fits(size: int, max_bytes: int) -> None:
    """Raise StoreFailed for a response larger than the limit for all: every other would go, and then it."""
    if size > max_bytes:
        raise StoreFailed(f"a response of {size} bytes is larger than --max-response-bytes")
