"""Metadata of a call in headers (gRPC over HTTP/2, "Custom-Metadata")."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator

Metadata = tuple[tuple[str, str | bytes], ...]
# Most bytes of one call's metadata in either direction, counted as for SETTINGS_MAX_HEADER_LIST_SIZE.
MAX_METADATA_BYTES = 16 << 10
# Bytes that a header field counts for besides its name and value (RFC 9113, section 6.5.2).
_FIELD_BYTES = 32
# The transport's own headers.
_OURS = ("content-type", "te", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding", "grpc-status", "grpc-message")


def parse_metadata(headers: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str | bytes]]:
    """Return the metadata among `headers`, in their order.

    A proxy may have joined values of one name with commas; binary values are split at them. Raises ValueError for a
    `-bin` value that is not base64, and for joined values that would be too large as separate fields.
    """
    left = MAX_METADATA_BYTES
    for name, value in headers:
        if name.startswith(":") or name in _OURS:
            continue
        if name.endswith("-bin"):
            if commas := value.count(","):
                # A value of only commas would otherwise grow hundreds of times.
                left -= (commas + 1) * (len(name) + _FIELD_BYTES) + len(value)
                if left < 0:
                    raise ValueError("joined values are too large")
            for one in value.split(","):
                yield name, _bytes(one.strip())
        else:
            yield name, value


def _bytes(text: str) -> bytes:
    """Decode base64, padded or not. Raises ValueError."""
    text = text.rstrip("=")
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
