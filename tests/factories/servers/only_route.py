"""The one model's parts of a router in this process, for tests that wait for what no metric tells."""

from __future__ import annotations

from typing import Any, cast

from penstock.router.frontend.routed_model import RoutedModel


def only_route(service: Any) -> RoutedModel:
    """Return the route of a router with one model. `service`: its RouterApp."""
    (route,) = service._table.routes
    return cast(RoutedModel, route)
