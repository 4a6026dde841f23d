"""Pages of a gateway beside its API: health, version, metrics, the document of its paths, and what no route takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock import __version__
from penstock.common.credentials import BearerTokens
from penstock.common.errors import PenstockError
from penstock.common.request_context import REQUEST_ID_KEY, accept_request_id
from penstock.gateway.answers import dumps
from penstock.gateway.exposition import exposition
from penstock.gateway.http_errors import OPENAI_ERRORS, HttpError, no_route, status_of
from penstock.gateway.known_paths import meant, methods_of
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.openapi import Routes, openapi_json
from penstock.gateway.request_head import TrustedHosts, foreign_host
from penstock.gateway.request_log import log_request

_JSON = "application/json"
# Paths of probes; the last two as on the metrics port of the other processes.
_ALIVE = "/healthz"
PROBES = ("/health", _ALIVE, "/readyz")
_OK, _UNAVAILABLE = dumps({"status": "ok"}), dumps({"status": "unavailable"})


class PlainPages:
    """The pages of one gateway. They ask no router, and take no place of a request."""

    def __init__(
        self,
        api: Routes,
        registry: CollectorRegistry,
        metrics: GatewayMetrics,
        hosts: TrustedHosts,
        *,
        is_up: Callable[[], bool],
        tokens: BearerTokens | None,
    ) -> None:
        """`api`: the paths of the document; `is_up` answers probes; `tokens`: of /metrics, None: it needs none."""
        self._api, self._registry, self._metrics, self._hosts = api, registry, metrics, hosts
        self._is_up, self._tokens = is_up, tokens
        # Made when somebody asks for it.
        self._openapi: bytes | None = None

    def routes(self) -> list[Route]:
        """Return the routes of all pages."""
        pages: dict[str, Any] = {
            **dict.fromkeys(PROBES, self._answer_probe),
            "/version": self._answer_version,
            "/openapi.json": self._answer_openapi,
            "/metrics": self._answer_metrics,
        }
        return [Route(path, page, methods=["GET"]) for path, page in pages.items()]

    def refusals(self) -> dict[Any, Any]:
        """Return the answers to requests that no route takes, by status."""
        return {404: self._no_route, 405: self._no_method}

    def answer_at_once(self, scope: Mapping[str, Any]) -> tuple[int, bytes] | None:
        """Return status and JSON of a probe's request by its ASGI scope; None for any other request."""
        return self._probed(scope["path"]) if scope["method"] == "GET" and scope["path"] in PROBES else None

    def _probed(self, path: str) -> tuple[int, bytes]:
        """200 while the gateway takes requests, else 503; for _ALIVE while it answers at all."""
        return (200, _OK) if path == _ALIVE or self._is_up() else (503, _UNAVAILABLE)

    async def _answer_probe(self, request: Request) -> Response:
        status, body = self._probed(request.url.path)
        return Response(body, status, media_type=_JSON)

    async def _answer_version(self, request: Request) -> Response:
        return _json({"version": __version__}, 200)

    async def _answer_openapi(self, request: Request) -> Response:
        if self._openapi is None:
            self._openapi = await asyncio.to_thread(openapi_json, self._api)
        return Response(self._openapi, media_type=_JSON)

    async def _answer_metrics(self, request: Request) -> Response:
        if self._tokens is not None and not self._tokens.accepts(request.headers.get("authorization")):
            error = HttpError(401, f"/metrics needs {self._tokens.wanted}", reason="UNAUTHENTICATED")
            return Response(OPENAI_ERRORS.body(error, {}), 401, {"www-authenticate": "Bearer"}, _JSON)
        host = request.headers.get("host", "").encode("latin-1")
        if self._tokens is None and not self._hosts.accepts(host):
            return Response(OPENAI_ERRORS.body(foreign_host(), {}), 421, media_type=_JSON)
        text, content_type = await exposition(self._registry, request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    async def _no_route(self, request: Request, _: Exception) -> Response:
        return self._refusal(request, no_route(meant(request.url.path, request.app.routes)))

    async def _no_method(self, request: Request, _: Exception) -> Response:
        methods = ", ".join(methods_of(request.scope, request.app.routes))
        error = HttpError(405, f"this path takes {methods}", reason="METHOD_NOT_ALLOWED")
        return self._refusal(request, error, {"allow": methods})

    def _refusal(self, request: Request, error: PenstockError, headers: Mapping[str, str] | None = None) -> Response:
        """Answer a request that no route takes."""
        status, request_id = status_of(error), accept_request_id(request.headers.get(REQUEST_ID_KEY, ""))
        self._metrics.requests("other", str(status)).inc()
        log_request("other", status, 0.0, request_id=request_id, reason=error.reason, field=None, tokens=None)
        shown = {**(headers or {}), REQUEST_ID_KEY: request_id}
        return Response(OPENAI_ERRORS.body(error, {}), status, shown, _JSON)


def _json(value: object, status: int) -> Response:
    return Response(dumps(value), status, media_type=_JSON)
