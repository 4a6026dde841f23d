"""Metadata of a call as headers carry it."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator

Metadata = tuple[tuple[str, str | bytes], ...]
# Headers that are the transport's own.
_OURS = ("content-type", "te", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding")


def parse_metadata(headers: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str | bytes]]:
    """Metadata among `headers`. Raises ValueError for a `-bin` value that is not base64."""
    for name, value in headers:
        if name.startswith(":") or name in _OURS:
            continue
        if name.endswith("-bin"):
            yield name, base64.b64decode(value + "=" * (-len(value) % 4))
        else:
            yield name, value
