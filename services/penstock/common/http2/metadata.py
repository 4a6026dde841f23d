"""Metadata of a call as headers carry it (gRPC over HTTP/2, "Custom-Metadata")."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator

Metadata = tuple[tuple[str, str | bytes], ...]
# Headers that are the transport's own.
_OURS = ("content-type", "te", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding", "grpc-status", "grpc-message")


def parse_metadata(headers: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str | bytes]]:
    """Metadata among `headers`, in their order. Raises ValueError for a `-bin` value that is not base64.

    Whoever passed headers on may have joined values of one name by commas, which binary ones have to be split at.
    """
    for name, value in headers:
        if name.startswith(":") or name in _OURS:
            continue
        if name.endswith("-bin"):
            for one in value.split(","):
                yield name, _bytes(one.strip())
        else:
            yield name, value


def _bytes(text: str) -> bytes:
    """Padded or not. Raises ValueError."""
    text = text.rstrip("=")
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
