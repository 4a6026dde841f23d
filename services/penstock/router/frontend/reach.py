"""Way from a request to the route of its model."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from penstock.common.errors import NotFound, PenstockError
from penstock.common.idle_only import asks_for_idle_only
from penstock.router.frontend.route_table import RouteTable
from penstock.router.frontend.routed_model import RoutedModel
from penstock.router.keys.key_desk import require_model
from penstock.router.metrics import UNKNOWN_MODEL, RouterMetrics
from penstock.serving.transport import ServerCall
from penstock.v1 import text_pb2

RoutedT = TypeVar(
    "RoutedT",
    text_pb2.GenerateTextRequest,
    text_pb2.ChatRequest,
    text_pb2.ScoreTextRequest,
    text_pb2.EmbedTextRequest,
    text_pb2.DetectWatermarkTextRequest,
    text_pb2.TokenizeRequest,
    text_pb2.DetokenizeRequest,
    text_pb2.RenderChatRequest,
)
# Methods that the tokenizer alone answers.
_WITHOUT_MODEL = ("Tokenize", "Detokenize", "RenderChat")


async def reach(
    table: RouteTable, method: str, request: RoutedT, context: ServerCall, metrics: RouterMetrics
) -> RoutedModel:
    """Return the route of a request, and put the route's own name into `model`. A model on demand is loaded first.

    The caller goes on in the same turn of the loop: see Residence.require. Raises PenstockError, which is counted.
    """
    model, status = UNKNOWN_MODEL, ""
    try:
        adapter, session = getattr(request, "adapter", ""), getattr(request, "session_id", "")
        route = choose_for(table, request, context, adapter, session, method=method)
        if route.residence is not None and method not in _WITHOUT_MODEL:
            model = route.name
            is_idle_only = asks_for_idle_only(context.invocation_metadata())
            await route.residence.require(context.time_remaining(), is_idle_only=is_idle_only)
        return route
    except PenstockError as error:
        status = error.code.name
        raise
    except asyncio.CancelledError:
        # The caller left while the model was loaded.
        status = "CANCELLED"
        raise
    finally:
        if status:
            metrics.requests(method, status).inc()
            metrics.model_requests(model, status).inc()


def choose_for(
    table: RouteTable,
    request: RoutedT,
    context: ServerCall,
    adapter: str = "",
    session: str = "",
    *,
    method: str = "",
) -> RoutedModel:
    """Choose the route for a caller. A key sees only what it may name: neither other models nor their loads.

    Raises PermissionDenied, and as RouteTable.choose and KeyDesk.find.
    """
    key = None if table.keys is None else table.keys.find(context.invocation_metadata(), method)
    if key is None or (key.models is None and key.adapters is None):
        return table.choose(request, adapter, session)
    for route in table.sharers.get(request.model, ()):
        # Its turn decides which of them answers, so all must be allowed.
        require_model(key, route.name)
    try:
        route = table.choose(request, adapter, session)
        # A model that is not loaded knows no names yet.
        named = (route.name, adapter) if route.is_cold else route.pool.choose_model(request.model, adapter)
    except NotFound as error:
        # Its message would list all names.
        raise NotFound(
            f"{error.field}: no such name is served to this key", reason=error.reason, field=error.field
        ) from None
    require_model(key, *named)
    return route
