"""Metadata of a call as headers carry it (gRPC over HTTP/2, "Custom-Metadata")."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator

Metadata = tuple[tuple[str, str | bytes], ...]
# Of one call, either way, counted as SETTINGS_MAX_HEADER_LIST_SIZE counts.
MAX_METADATA_BYTES = 16 << 10
# Of a header field, besides its name and value (RFC 9113, section 6.5.2).
_FIELD_BYTES = 32
# Headers that are the transport's own.
_OURS = ("content-type", "te", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding", "grpc-status", "grpc-message")


def parse_metadata(headers: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str | bytes]]:
    """Metadata among `headers`, in their order. Raises ValueError for a `-bin` value that is not base64, and for joined
    ones that were larger than headers may be if each were a field of its own.

    Whoever passed headers on may have joined values of one name by commas, which binary ones have to be split at.
    """
    left = MAX_METADATA_BYTES
    for name, value in headers:
        if name.startswith(":") or name in _OURS:
            continue
        if name.endswith("-bin"):
            if commas := value.count(","):
                # Nearly nothing but commas would otherwise become hundreds of times as much.
                left -= (commas + 1) * (len(name) + _FIELD_BYTES) + len(value)
                if left < 0:
                    raise ValueError("joined values are too large")
            for one in value.split(","):
                yield name, _bytes(one.strip())
        else:
            yield name, value


def _bytes(text: str) -> bytes:
    """Padded or not. Raises ValueError."""
    text = text.rstrip("=")
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
