"""Question whether a caller's key has a scope: the metadata of ListModels that asks it."""

from __future__ import annotations

from contextvars import ContextVar

# In a call of ListModels to a router: a key without this scope is refused.
NEEDED_SCOPE_KEY = "penstock-needed-scope"
# Scope that the calls made from this one ask for; empty: none.
needed_scope: ContextVar[str] = ContextVar("penstock_needed_scope", default="")
