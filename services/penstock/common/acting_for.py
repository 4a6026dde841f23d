"""Calls that count for another key than the one that makes them: the metadata that names that key."""

from __future__ import annotations

from contextvars import ContextVar

# In a call to a router: the digest of a secret (credentials.py), in hex. The rights and quotas of its key hold. Callers
# with a token of --auth-token-file may send it, and keys with the scope `delegate`.
ACTING_FOR_KEY = "penstock-acting-for"
# That of the calls made from this one; empty: they count for their own token.
acting_for: ContextVar[str] = ContextVar("penstock_acting_for", default="")
