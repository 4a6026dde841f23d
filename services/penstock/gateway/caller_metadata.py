"""Pairs of texts that a caller attaches to what the gateway keeps, within OpenAI's bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.common.errors import InvalidArgument
from penstock.gateway.request_fields import typed

_MOST_PAIRS, _MOST_NAME_CHARS, _MOST_VALUE_CHARS = 16, 64, 512


def read_metadata(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the field `metadata`. Raises InvalidArgument naming an entry."""
    if len(given) > _MOST_PAIRS:
        raise InvalidArgument("metadata", f"must have at most {_MOST_PAIRS} entries", reason="TOO_MANY")
    for name, value in given.items():
        text = typed(value, str, f"metadata.{name[:_MOST_NAME_CHARS]}")
        if len(name) > _MOST_NAME_CHARS or len(text) > _MOST_VALUE_CHARS or "\0" in name + text:
            raise InvalidArgument(
                f"metadata.{name[:_MOST_NAME_CHARS]}",
                f"must have at most {_MOST_VALUE_CHARS} characters, and its name {_MOST_NAME_CHARS}",
            )
    return dict(given)
