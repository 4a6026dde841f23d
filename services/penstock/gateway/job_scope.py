"""Right of a caller to make files and batches: the scope `jobs`, where the router has keys."""

from __future__ import annotations

from penstock_client import AsyncClient

from penstock.common.needed_scope import needed_scope
from penstock.gateway.places import ANYBODY

_SCOPE = "jobs"


async def require_jobs_scope(tenant: str, client: AsyncClient) -> None:
    """Ask the router as the caller. Raises PermissionDenied SCOPE_MISSING; tokens of other files have every scope."""
    if tenant == ANYBODY:
        return
    before = needed_scope.set(_SCOPE)
    try:
        await client.list_models()
    finally:
        needed_scope.reset(before)
