"""List of the models that clients may name: those of all routes, their adapters and their aliases."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.router.frontend.residence import ResidenceState
from penstock.router.frontend.route_table import RouteTable
from penstock.router.frontend.routed_model import RoutedModel
from penstock.router.keys.api_key import ApiKey
from penstock.v1 import common_pb2, model_pb2, text_pb2


def list_models(table: RouteTable, key: ApiKey | None = None) -> list[text_pb2.Model]:
    """Return every model that a backend serves or served, each followed by its aliases and adapters.

    A name that several models share comes last, with their weights. With a key: those that it may name.
    """
    if key is not None and (key.models is not None or key.adapters is not None):
        return _of_key(table, key)
    models = [model for route in table.routes for model in _of_route(route)]
    for alias, sharers in table.sharers.items():
        models.append(_shared(alias, sharers))
    return models


def _of_key(table: RouteTable, key: ApiKey) -> list[text_pb2.Model]:
    models = []
    for route in table.routes:
        # Aliases follow their model, and adapters know their parent.
        named = ""
        for model in _of_route(route):
            if not model.parent and (model.name in route.pool.models or model.name == route.name):
                named = model.name
            if key.may_use(named, model.name if model.parent else ""):
                models.append(model)
    for alias, sharers in table.sharers.items():
        # A request for it may go to any of them.
        if all(key.may_use(route.name) for route in sharers):
            models.append(_shared(alias, sharers))
    return models


def _of_route(route: RoutedModel) -> Iterator[text_pb2.Model]:
    if route.entry is not None and route.entry.name not in route.pool.models:
        yield _cold(text_pb2.Model(name=route.name, state=common_pb2.MODEL_STATE_UNAVAILABLE), route)
        return
    fingerprint = route.link.fingerprint
    for name, info in route.pool.models.items():
        if route.entry is not None and name != route.name:
            # Of a backend that does not serve what the file says.
            continue
        ready = len(route.pool.ready(name))
        yield _cold(_model(info, ready, fingerprint), route)
        # With a file the aliases are the file's.
        for alias in info.aliases if route.entry is None else ():
            further = _model(info, ready, fingerprint)
            further.name = alias
            yield further
        for adapter in route.pool.adapters(name):
            part = _model(info, len(route.pool.ready(name, adapter)), fingerprint)
            part.name, part.parent = adapter, name
            yield part


def _cold(model: text_pb2.Model, route: RoutedModel) -> text_pb2.Model:
    """Add the state of a model on demand that is not loaded: EMPTY, or LOADING with its progress."""
    residence = route.residence
    if residence is not None and residence.state is not ResidenceState.LOADED:
        is_coming = residence.state is ResidenceState.LOADING
        model.state = common_pb2.MODEL_STATE_LOADING if is_coming else common_pb2.MODEL_STATE_EMPTY
        model.percent_loaded = residence.percent if is_coming else 0.0
    return model


def _shared(alias: str, sharers: list[RoutedModel]) -> text_pb2.Model:
    """Return a name for one or several models: as the first of them that is ready."""
    parts = [next(_of_route(route)) for route in sharers]
    shown = next((part for part in parts if part.state == common_pb2.MODEL_STATE_READY), parts[0])
    model = text_pb2.Model()
    model.CopyFrom(shown)
    model.name = alias
    model.backends = sum(part.backends for part in parts)
    for route in sharers:
        assert route.entry is not None
        model.shares.add(model=route.name, weight=route.entry.weight)
    return model


def _model(info: model_pb2.GetModelInfoResponse, ready_backends: int, tokenizer_fingerprint: str) -> text_pb2.Model:
    """A model as clients see it."""
    ready = ready_backends > 0
    return text_pb2.Model(
        name=info.model,
        state=common_pb2.MODEL_STATE_READY if ready else common_pb2.MODEL_STATE_UNAVAILABLE,
        percent_loaded=info.percent_loaded if info.percent_loaded else 100.0,
        max_context_tokens=info.limits.max_context_tokens,
        vocab_size=info.vocab_size,
        tokenizer_fingerprint=tokenizer_fingerprint,
        backends=ready_backends,
    )
