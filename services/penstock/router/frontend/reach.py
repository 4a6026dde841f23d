"""Way from a request to the route of its model."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from penstock.common.errors import PenstockError
from penstock.common.idle_only import asks_for_idle_only
from penstock.router.frontend.route_table import RouteTable
from penstock.router.frontend.routed_model import RoutedModel
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
        route = table.choose(request, getattr(request, "adapter", ""), getattr(request, "session_id", ""))
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
