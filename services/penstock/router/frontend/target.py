"""Which model a request goes to, and who asks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from penstock.common.errors import InvalidArgument, NotFound
from penstock.router.backends.pool import BackendPool
from penstock.router.config import RouterConfig
from penstock.router.frontend.convert import DEFAULT_TENANT


def choose_model(pool: BackendPool, asked: str) -> str:
    """The model's name; empty while none is known. Raises NotFound, InvalidArgument when several are served."""
    if asked and pool.models and asked not in pool.models:
        raise NotFound("model: no backend serves a model of this name", reason="MODEL_NOT_FOUND", field="model")
    served = [asked] if asked else [name for name in pool.models if pool.ready(name)] or list(pool.models)
    if len(served) > 1:
        raise InvalidArgument("model", "must be set: several models are served (ListModels names them)")
    return next(iter(served), "")


def tenant_of(config: RouterConfig, metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Who asks, as a hash of the credentials; a constant while nobody has to authenticate."""
    if config.auth_token_file is None:
        return DEFAULT_TENANT
    return hashlib.sha256(str(dict(metadata or ()).get("authorization", "")).encode()).hexdigest()
