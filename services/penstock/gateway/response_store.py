"""Answers of /v1/responses that callers may build on: what a store of them does. Two do it, for one gateway
(sqlite_responses.py) and for several (redis_responses.py)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

MEMORY = "memory"


class StoreFailed(Exception):
    """A store that could not be asked, or did not do it; str() says why."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the items that its request brought; those of earlier turns are with theirs."""

    response: dict[str, Any]
    input: list[dict[str, Any]]

    @property
    def response_id(self) -> str:
        """Its id."""
        return str(self.response["id"])


class ResponseStore(Protocol):
    """Store of responses, bounded in number, bytes and time. A caller sees its own only.

    All but open and close raise StoreFailed.
    """

    @property
    def num_responses(self) -> int:
        """Responses that were kept when it was last written to."""

    @property
    def num_bytes(self) -> int:
        """Bytes of these."""

    async def open(self) -> None:
        """Reach the store. Raises StartupError where no later try can succeed."""

    async def close(self) -> None:
        """Leave it. Again is no harm."""

    async def put(self, caller: str, stored: StoredResponse, previous: str | None) -> None:
        """Keep a response; the oldest leave where there are too many."""

    async def get(self, caller: str, response_id: str) -> StoredResponse | None:
        """Return a response; None where the caller has none of this id."""

    async def chain(self, caller: str, response_id: str, max_bytes: int) -> list[StoredResponse] | None:
        """Return a response and all that it was built on, oldest first; None where one of them is missing.

        Raises OverflowError when they have more than `max_bytes` bytes of JSON.
        """

    async def delete(self, caller: str, response_id: str) -> bool:
        """Delete a response of the caller's; False where there is none."""


def encode_response(stored: StoredResponse) -> tuple[bytes, bytes]:
    """Return the JSON of a response's input and of itself; half of a surrogate pair becomes a question mark."""
    given, response = (
        json.dumps(one, ensure_ascii=False).encode("utf-8", "replace") for one in (stored.input, stored.response)
    )
    return given, response


def check_fits(size: int, max_bytes: int) -> None:
    """Raise StoreFailed for a response larger than all may be together: every other would leave, and then it."""
    if size > max_bytes:
        raise StoreFailed(f"a response of {size} bytes is larger than --max-response-bytes")
