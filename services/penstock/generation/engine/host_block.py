"""A prefix hit in the host pool."""

from __future__ import annotations

from typing import NamedTuple


class HostBlock(NamedTuple):
    """A prefix hit in the host pool: `block` there holds the prefix of `block_hash`."""

    block: int
    block_hash: bytes
