"""Tokens that the router's calls accept where there is a file of keys: those with the scope of the call."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.credentials import BearerTokens
from penstock.router.keys.api_key import KeyScope, scope_missing
from penstock.router.keys.key_ring import KeyRing


@dataclass(frozen=True, slots=True)
class ScopedTokens:
    """Tokens of one kind of call. Implements common.credentials.BearerTokens."""

    ring: KeyRing
    # One of them is needed; none: any valid key will do.
    scopes: tuple[KeyScope, ...] = ()
    # Tokens of a file beside the keys; they have no scopes and no quotas.
    others: BearerTokens | None = None
    # Read the file again where it changed: for callers on threads, where nobody else does.
    refreshes: bool = False

    @property
    def wanted(self) -> str:
        own = f"a key with the scope {' or '.join(self.scopes)}" if self.scopes else "a key"
        return own if self.others is None else f"{self.others.wanted}, or {own}"

    def accepts(self, authorization: str | bytes | None) -> bool:
        """True for a valid key, and for a token of the other file.

        Raises PermissionDenied for a key without a scope, Unauthenticated for one that is revoked or has expired.
        """
        if self.refreshes:
            self.ring.refresh()
        key = self.ring.find(authorization)
        if key is None:
            return self.others is not None and self.others.accepts(authorization)
        if self.scopes and key.scopes.isdisjoint(self.scopes):
            raise scope_missing(self.scopes)
        return True
