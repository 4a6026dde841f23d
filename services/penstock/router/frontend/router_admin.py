"""RouterAdminService: calls of operators that are about the router's models, not about one backend."""

from __future__ import annotations

import asyncio

from penstock.common.errors import FailedPrecondition, InvalidArgument, NotFound
from penstock.common.model_names import those_there_are
from penstock.router.frontend.forwarding import Context, Forwarding
from penstock.router.frontend.model_roll import ModelRoll
from penstock.router.frontend.models_watch import ModelsWatch
from penstock.router.frontend.route_table import RouteTable
from penstock.router.keys.key_desk import KeyDesk
from penstock.router.keys.key_messages import keys_facts
from penstock.router.keys.ledger_tables import day_of
from penstock.v1 import router_pb2, router_pb2_grpc

_MOST_DAYS = 366


class RouterAdminServicer(router_pb2_grpc.RouterAdminServiceServicer):
    """Handlers of RouterAdminService."""

    def __init__(
        self,
        forwarding: Forwarding,
        table: RouteTable,
        watch: ModelsWatch | None,
        roll: ModelRoll,
        keys: KeyDesk | None = None,
    ) -> None:
        """Make it. `watch`: None where there is no file of models; `keys`: None where there is no file of keys."""
        self._forwarding = forwarding
        self._table = table
        self._watch = watch
        self._roll = roll
        self._keys = keys

    async def ReloadModels(
        self, request: router_pb2.ReloadModelsRequest, context: Context
    ) -> router_pb2.ReloadModelsResponse:
        """Read the file of models now."""
        self._forwarding.require_admin()
        if self._watch is None:
            raise FailedPrecondition("the router was started without --models", reason="MODELS_FILE")
        applied = await self._watch.reload()
        return router_pb2.ReloadModelsResponse(
            added=applied.added,
            changed=applied.changed,
            removed=applied.removed,
            failed=[router_pb2.ModelFailure(model=model, cause=cause) for model, cause in applied.failed],
        )

    async def RollModel(self, request: router_pb2.RollModelRequest, context: Context) -> None:  # type: ignore[override]
        """Give a model its weights anew while it is served."""
        self._forwarding.require_admin()
        route = self._table.route_of(request.model) or self._table.route_of("")
        model = request.model
        if route is None or (model and not route.name and model not in route.pool.models):
            names = [name for one in self._table.routes for name in (one.name, *one.pool.models)]
            raise NotFound(
                f"model: no model has this name; {those_there_are(names)}", reason="MODEL_NOT_FOUND", field="model"
            )
        grace = request.grace_seconds if request.HasField("grace_seconds") else None
        async for backend, step in self._roll.run(route, model, grace, context):
            await context.write(router_pb2.RollModelResponse(backend=backend, step=step))

    async def ListKeys(self, request: router_pb2.ListKeysRequest, context: Context) -> router_pb2.ListKeysResponse:
        """Describe the keys, and what each used."""
        keys = self._key_desk()
        days = request.days if request.HasField("days") else 1
        if not 1 <= days <= _MOST_DAYS:
            raise InvalidArgument("days", f"must be from 1 to {_MOST_DAYS}")
        today = day_of(keys.now)
        usage = await keys.usage(today - days + 1, today)
        facts = await asyncio.to_thread(keys_facts, keys.ring.keys, usage, keys.ring)
        return router_pb2.ListKeysResponse(keys=facts)

    async def RevokeKey(self, request: router_pb2.RevokeKeyRequest, context: Context) -> router_pb2.RevokeKeyResponse:
        """Refuse a key from now on."""
        await self._key_desk().revoke(request.label)
        return router_pb2.RevokeKeyResponse()

    def _key_desk(self) -> KeyDesk:
        self._forwarding.require_admin()
        if self._keys is None:
            raise FailedPrecondition("the router was started without --keys-file", reason="KEYS_OFF")
        return self._keys
