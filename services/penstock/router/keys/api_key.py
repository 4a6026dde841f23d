"""Key of a caller: what it may call, the models that it may name, and how much it may use."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.common.errors import PermissionDenied


class KeyScope(StrEnum):
    """Calls that a key may make. Any valid key may list models, and convert text and ids."""

    GENERATE = "generate"
    EMBED = "embed"
    JOBS = "jobs"
    ADMIN = "admin"
    MODEL = "model"
    METRICS = "metrics"
    # Calls that count for another key: for the token with which a gateway sends the lines of batches.
    DELEGATE = "delegate"


DEFAULT_SCOPES = frozenset((KeyScope.GENERATE, KeyScope.EMBED))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyQuotas:
    """Bounds on the use of a key; None: no bound. All but the day's are those of one process of a router."""

    requests_per_minute: int | None = None
    # Of prompts and answers together, as those of a day.
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    # From midnight to midnight, UTC, over all routers that share a ledger.
    tokens_per_day: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key of the file."""

    # Its name in metrics, in the ledger and for operators; it stays when the secret is replaced.
    label: str
    # SHA-256 of each secret that stands for it: two while one replaces the other.
    digests: tuple[bytes, ...]
    # Keys of one tenant share prefixes, sessions and turns.
    tenant: str
    scopes: frozenset[KeyScope] = DEFAULT_SCOPES
    # Own names of models, and names of adapters; None: all.
    models: frozenset[str] | None = None
    adapters: frozenset[str] | None = None
    quotas: KeyQuotas = field(default_factory=KeyQuotas)
    # Seconds since 1970; None: never.
    expires: float | None = None
    revoked: bool = False

    @property
    def tenant_digest(self) -> str:
        """Name of its tenant for caches and turns. No digest of a bearer token is like it."""
        return hashlib.sha256(f"tenant of keys:{self.tenant}".encode()).hexdigest()

    def may_use(self, model: str, adapter: str = "") -> bool:
        """True when it may name a model, and an adapter of that."""
        return (self.models is None or model in self.models) and (
            not adapter or self.adapters is None or adapter in self.adapters
        )


def scope_missing(scopes: Sequence[KeyScope], *, of_owner: bool = False) -> PermissionDenied:
    """Make the refusal of a call that needs one of these scopes. `of_owner`: of the key that the call counts for, not
    of the one that makes it."""
    wanted = " or ".join(scopes)
    name = "the key that this call counts for" if of_owner else "this key"
    metadata = {"scope": wanted, **({"key": "owner"} if of_owner else {})}
    return PermissionDenied(f"{name} lacks the scope {wanted}", reason="SCOPE_MISSING", metadata=metadata)
