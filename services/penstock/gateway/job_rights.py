"""Rights of callers to make files and batches where the router has keys, and the key that a batch's lines count for."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import grpc
from penstock_client import AsyncClient

from penstock.common.acting_for import acting_for
from penstock.common.credentials import secret_digest
from penstock.common.errors import FailedPrecondition, PenstockError, from_rpc_error
from penstock.common.needed_scope import needed_scope
from penstock.gateway.places import ANYBODY

_SCOPE = "jobs"
# Scopes that the calls of lines need, by the endpoints of batches; all others need the second.
_SCOPES, _USUAL_SCOPE = {"/v1/embeddings": "embed"}, "generate"


class JobRights:
    """Questions to the router about callers, each a call of ListModels."""

    def __init__(self, own: Callable[[], AsyncClient]) -> None:
        """`own`: returns the client of the lines of batches."""
        self._own = own

    async def require_scope(self, tenant: str, client: AsyncClient) -> None:
        """Ask as the caller. Raises PermissionDenied SCOPE_MISSING; tokens of other files have every scope.

        `tenant`: as Caller's.
        """
        if tenant == ANYBODY:
            return
        before = needed_scope.set(_SCOPE)
        try:
            await client.list_models()
        finally:
            needed_scope.reset(before)

    async def key_of_batch(self, tenant: str, endpoint: str) -> str:
        """Return the digest of the key that a caller's lines count for, empty without a token.

        Raises FailedPrecondition NO_JOB_TOKEN where the gateway's own token may not make the lines' calls, or none for
        that key; PermissionDenied for a caller's key that is not valid any more.
        """
        if tenant == ANYBODY:
            return ""
        digest = secret_digest(tenant.encode()).hex()
        await self._ask_own(needed_scope, _SCOPES.get(endpoint, _USUAL_SCOPE))
        await self._ask_own(acting_for, digest)
        return digest

    async def _ask_own(self, question: ContextVar[str], asked: str) -> None:
        """Ask with the gateway's own token."""
        before = question.set(asked)
        try:
            await self._own().list_models()
        except (PenstockError, grpc.RpcError) as failure:
            error = failure if isinstance(failure, PenstockError) else from_rpc_error(failure)
            # Other refusals are of the caller's key, or come from something between us and the router.
            if error.code is not grpc.StatusCode.UNAUTHENTICATED and error.reason != "SCOPE_MISSING":
                raise error from None
            raise FailedPrecondition(
                f"the lines of batches cannot be sent with the token of --job-token-file: {error.message}",
                reason="NO_JOB_TOKEN",
            ) from None
        finally:
            question.reset(before)
