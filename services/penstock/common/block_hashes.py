"""Hashes of KV blocks: the engine finds a cached prefix by them, and routers know by short names which backend has it.

A block's hash covers all tokens up to its end and the salt, so equal hashes mean equal prefixes. A salt is what a
router knows of a request and, after a NUL, what only the process knows: its reading of an adapter, its version of the
weights. The second part is at the end of the hash, so that a router can make the name, which is from the beginning.
"""

from __future__ import annotations

import hashlib

# Number of this way to name blocks (PrefixChanges.scheme).
SCHEME = 1
_DOMAIN = b"penstock.prefix.v1\0"
_CHAIN_BYTES, _READING_BYTES, _NAME_BYTES = 32, 16, 8


def routing_salt(cache_salt: str, adapter: str) -> str:
    """Salt of a request's blocks as far as a router knows it: each adapter, by its name, computes its own keys."""
    return f"{adapter}:{cache_salt}" if adapter else cache_salt


def root_hash(salt: str) -> bytes:
    """Return the hash before the first block. Prefixes are shared only under an equal salt (one per tenant)."""
    known, _, reading = salt.partition("\0")
    chain = hashlib.sha256(_DOMAIN + known.encode()).digest()
    return chain + hashlib.sha256(reading.encode()).digest()[:_READING_BYTES] if reading else chain


def chain_hash(parent: bytes, content: bytes) -> bytes:
    """Return the hash of one full block after `parent`: equal iff all contents up to its end, and salts, are equal."""
    return hashlib.sha256(parent[:_CHAIN_BYTES] + content).digest() + parent[_CHAIN_BYTES:]


def short_name(block_hash: bytes) -> int:
    """Return the 64 bits by which routers know a block: two with one name cost a cache miss, never a wrong answer."""
    return int.from_bytes(block_hash[:_NAME_BYTES], "little")
