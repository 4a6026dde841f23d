"""Scopes that the router's calls need of a key, beside the tokens of the other files."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.common.config import is_loopback
from penstock.common.credentials import BearerTokens, TokenFile
from penstock.router.config import RouterConfig
from penstock.router.frontend.forwarding import (
    ADMIN_SERVICE,
    FACTS_METHOD,
    MODEL_SERVICE,
    OPENING_METHODS,
    ROUTER_ADMIN_SERVICE,
    token_files,
)
from penstock.router.keys.api_key import KeyScope
from penstock.router.keys.key_ring import KeyRing
from penstock.router.keys.method_scopes import METHOD_SCOPES
from penstock.router.keys.scoped_tokens import ScopedTokens
from penstock.serving.metrics_endpoint import METRICS_TOKENS

_SCOPES = {f"/penstock.v1.TextService/{method}": scope for method, scope in METHOD_SCOPES.items()}


def key_token_files(config: RouterConfig, ring: KeyRing, others: Mapping[str, KeyScope]) -> dict[str, BearerTokens]:
    """Return the tokens of all calls where there is a file of keys: keys by their scopes, and the files' tokens.

    By service and method as `token_files`; "" stands for all others. `others`: scopes of further methods. Raises
    StartupError.
    """
    usual = TokenFile(config.auth_token_file, "--auth-token-file") if config.auth_token_file is not None else None
    files = token_files(config)
    # On a public address, tokens for text must not be enough to stop the service.
    operators = usual if is_loopback(config.host) else None

    def beside(service: str, *scopes: KeyScope) -> ScopedTokens:
        return ScopedTokens(ring, scopes, files.get(service) or operators)

    made: dict[str, BearerTokens] = {"": ScopedTokens(ring, (), usual)}
    made |= {name: ScopedTokens(ring, (scope,), usual) for name, scope in {**_SCOPES, **others}.items()}
    for service in (ADMIN_SERVICE, ROUTER_ADMIN_SERVICE):
        made[service] = beside(service, KeyScope.ADMIN)
    for name in OPENING_METHODS:
        # Operators' tokens open the model on loopback only.
        opens = files.get(name) or (files.get(MODEL_SERVICE) or operators if is_loopback(config.host) else None)
        made[name] = ScopedTokens(ring, (KeyScope.MODEL,), opens)
    facts = files.get(FACTS_METHOD) or files.get(MODEL_SERVICE) or operators
    made[FACTS_METHOD] = ScopedTokens(ring, (KeyScope.ADMIN, KeyScope.MODEL), facts)
    made[METRICS_TOKENS] = metrics_tokens(config, ring)
    return made


def metrics_tokens(config: RouterConfig, ring: KeyRing) -> BearerTokens:
    """Return the tokens of the metrics port. Raises StartupError."""
    usual = TokenFile(config.auth_token_file, "--auth-token-file") if config.auth_token_file is not None else None
    return ScopedTokens(ring, (KeyScope.METRICS,), usual, refreshes=True)
