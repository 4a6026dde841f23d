"""A prefix hit in the host pool."""

from __future__ import annotations

from typing import NamedTuple

# Stands for a block that only the store behind the host pool has.
IN_STORE = -1


class HostBlock(NamedTuple):
    """A prefix hit in the host pool: `block` there holds the prefix of `block_hash`.

    In a search of the store behind it `block` may be IN_STORE.
    """

    block: int
    block_hash: bytes
