"""Gateway process: OpenAI's HTTP and a chat page in front of a router; it is a plain client of the router."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import grpc
from penstock_client import AsyncClient, ClientConfig, TLSConfig
from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock import __version__
from penstock.common.addresses import BoundAddresses
from penstock.common.config import is_loopback
from penstock.common.credentials import TokenFile, channel_tls_context, check_channel_files
from penstock.common.errors import PenstockError, StartupError
from penstock.common.logging import get_logger
from penstock.common.metrics import add_process_metrics
from penstock.common.request_context import REQUEST_ID_KEY, accept_request_id
from penstock.gateway.answers import dumps
from penstock.gateway.background import Background
from penstock.gateway.batch_routes import cancel_batch, create_batch, get_batch, list_batches
from penstock.gateway.callers import Callers
from penstock.gateway.chat import chat_completions
from penstock.gateway.chat_page import page_routes
from penstock.gateway.completions import completions
from penstock.gateway.config import GatewayConfig
from penstock.gateway.connections import Turns
from penstock.gateway.conversations import (
    create_conversation,
    create_items,
    delete_conversation,
    delete_item,
    get_conversation,
    get_item,
    list_items,
    update_conversation,
)
from penstock.gateway.endpoint import Door, Endpoint, Handler, call_metadata, shown_authorization
from penstock.gateway.file_routes import create_file, delete_file, get_file, get_file_content, list_files
from penstock.gateway.http_errors import (
    ANTHROPIC_ERRORS,
    OPENAI_ERRORS,
    RESPONSE_ERRORS,
    ErrorShape,
    HttpError,
    no_route,
    status_of,
)
from penstock.gateway.http_server import HttpServer
from penstock.gateway.job_rights import JobRights
from penstock.gateway.jobs import Jobs
from penstock.gateway.jobs_port import JobsPort, port_config
from penstock.gateway.kept_stores import open_stores
from penstock.gateway.known_paths import meant, methods_of
from penstock.gateway.line_answers import JobClients, LineAnswers
from penstock.gateway.messages import count_tokens, messages
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.openapi import Routes, openapi_json
from penstock.gateway.places import BodyBytes, Places
from penstock.gateway.request_head import TrustedHosts, foreign_host
from penstock.gateway.request_log import log_request
from penstock.gateway.responses import (
    cancel_response,
    compact_response,
    count_input_tokens,
    delete_response,
    get_response,
    list_input_items,
    responses,
)
from penstock.gateway.text_routes import (
    apply_template,
    detokenize,
    embeddings,
    get_model,
    list_models,
    list_options,
    score,
    tokenize,
    tokenizer_info,
)
from penstock.http2.channel import Http2Channel
from penstock.serving.channels import watch_health
from penstock.serving.health_socket import HealthSocket
from penstock.serving.server import OwnServer, RunningServer, open_tracing

ROUTER_SERVICE = "penstock.v1.TextService"
# Seconds between attempts to watch the router's health.
_RETRY_SECONDS = 0.5
# Seconds of waiting for the router after which a start logs it.
_SILENT_SECONDS = 3.0
# Seconds after the drain for the last bytes to be sent.
_CLOSE_SECONDS = 0.5
_POST: dict[str, Handler] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/messages": messages,
    "/v1/messages/count_tokens": count_tokens,
    "/v1/responses": responses,
    "/v1/responses/input_tokens": count_input_tokens,
    "/v1/responses/compact": compact_response,
    "/v1/responses/{name}/cancel": cancel_response,
    "/v1/conversations": create_conversation,
    "/v1/conversations/{name}": update_conversation,
    "/v1/conversations/{name}/items": create_items,
    "/v1/embeddings": embeddings,
    "/v1/score": score,
    "/v1/files": create_file,
    "/v1/batches": create_batch,
    "/v1/batches/{name}/cancel": cancel_batch,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/apply-template": apply_template,
}
_GET: dict[str, Handler] = {
    "/v1/models": list_models,
    "/v1/models/{name:path}": get_model,
    "/v1/responses/{name}": get_response,
    "/v1/responses/{name}/input_items": list_input_items,
    "/v1/conversations/{name}": get_conversation,
    "/v1/conversations/{name}/items": list_items,
    "/v1/conversations/{name}/items/{item}": get_item,
    "/v1/files": list_files,
    "/v1/files/{name}": get_file,
    "/v1/files/{name}/content": get_file_content,
    "/v1/batches": list_batches,
    "/v1/batches/{name}": get_batch,
    "/options": list_options,
    "/tokenizer_info": tokenizer_info,
}
# Seconds of work for a probe, and the most that may be saved up.
_PROBE_SECONDS, _SAVED_SECONDS = 0.001, 0.05
# Paths of probes.
_PROBES = frozenset(("/health", "/healthz", "/readyz"))
# They reveal nothing but the program itself, and the chat page asks before its reader has shown a token.
_PUBLIC = frozenset(("/options",))
_DELETE: dict[str, Handler] = {
    "/v1/responses/{name}": delete_response,
    "/v1/conversations/{name}": delete_conversation,
    "/v1/conversations/{name}/items/{item}": delete_item,
    "/v1/files/{name}": delete_file,
}
# Routes of the document at /openapi.json.
ROUTES: Routes = {"post": _POST, "get": _GET, "delete": _DELETE}
# Paths of OpenAI's API and of Anthropic's.
_OF_BOTH = frozenset(("/v1/models", "/v1/models/{name:path}"))
# POST routes that read their body themselves, and those that clients send without one.
_UPLOADS = frozenset(("/v1/files",))
_MAYBE_EMPTY = frozenset(
    ("/v1/batches/{name}/cancel", "/v1/responses/{name}/cancel", "/v1/responses/compact", "/v1/conversations")
)
# Routes with errors in another form than OpenAI's.
_ERRORS: dict[str, ErrorShape] = {
    "/v1/messages": ANTHROPIC_ERRORS,
    "/v1/messages/count_tokens": ANTHROPIC_ERRORS,
    "/v1/responses": RESPONSE_ERRORS,
    # It may be a stream, too.
    "/v1/responses/{name}": RESPONSE_ERRORS,
    "/v1/responses/input_tokens": RESPONSE_ERRORS,
}
_log = get_logger("penstock.gateway")


class GatewayApp(OwnServer):
    """The gateway as a service that listens on its own."""

    name = "gateway"

    def __init__(self, config: GatewayConfig, registry: CollectorRegistry) -> None:
        """Make it inside the event loop that will serve it. Raises StartupError naming the flag of a bad file."""
        config.validate()
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._config, self._registry = config, registry
        check_channel_files(config)
        # Penstock's own transport: grpc.aio takes more time for each message than the rest of the gateway.
        self._channel = Http2Channel(
            config.router,
            config,
            timeout=config.connect_timeout_seconds,
            tls=channel_tls_context(config),
            server_name=config.channel_tls_server_name,
            stream_window=config.answer_window_bytes,
        )
        try:
            self._client = AsyncClient(config.router, _client_config(config), channel=self._channel.for_stubs)
        except ValueError as error:
            if config.is_channel_tls or is_loopback(config.router.rpartition(":")[0]):
                raise StartupError(
                    "--channel-token-file must hold a token, without spaces in it", flag="--channel-token-file"
                ) from error
            raise StartupError(
                "--channel-token-file needs --channel-tls for a router that is not loopback", flag="--channel-tls"
            ) from error
        self._callers = Callers(self._client, config)
        self._metrics = GatewayMetrics(registry)
        self._places = Places(
            config.max_requests, config.tenant_share, shares_anybody=config.channel_token_file is not None
        )
        self._hosts = TrustedHosts(config.host, config.allowed_hosts)
        self._bodies = BodyBytes(config.max_bodies_bytes, config.tenant_share)
        self._tracing = open_tracing(config, self.name)
        self._kept = open_stores(config)
        self._background = None if self._kept is None else Background(self._kept, config, self._places, self._metrics)
        self._jobs: Jobs | None = None
        self._grpc: RunningServer | None = None
        if config.has_jobs:
            clients = JobClients(self._client, config.job_token_file)
            lines = LineAnswers(config, clients.next, _POST, self._kept)
            self._jobs = Jobs(config, self._metrics, lines.answer, JobRights(clients.next), config.max_body_bytes)
            if config.jobs_port >= 0:
                port = JobsPort(config, self._jobs, self._callers, self._places)
                self._grpc = RunningServer(port, port_config(config), registry)
        self._probe_turns = Turns(config.anonymous_cpu_share, _PROBE_SECONDS, _SAVED_SECONDS)
        # The most that may come: they are admitted in a moment.
        self._known_turns = Turns(1.0, 0.0, 0.0)
        self._server = HttpServer(
            self._application(),
            config,
            self._goes_first,
            on_turned_away=lambda status: self._metrics.requests("other", str(status)).inc(),
            on_evicted=self._metrics.evicted.inc,
        )
        self._metrics.running.set_function(lambda: self._places.running)
        self._metrics.connections.set_function(lambda: self._server.connections)
        self._metrics.strangers.set_function(lambda: self._server.strangers)
        self._metrics.body_bytes.set_function(lambda: self._bodies.held)
        if (kept := self._kept) is not None:
            self._metrics.responses.set_function(lambda: kept.responses.num_responses)
            self._metrics.response_bytes.set_function(lambda: kept.responses.num_bytes)
            self._metrics.conversations.set_function(lambda: kept.conversations.num_conversations)
            self._metrics.conversation_bytes.set_function(lambda: kept.conversations.num_bytes)
        self._tokens = (
            TokenFile(config.metrics_token_file, "--metrics-token-file") if config.metrics_token_file else None
        )
        self._router_serves = asyncio.Event()
        self._health: asyncio.Task[None] | None = None
        self._health_socket = HealthSocket(config.health_socket, lambda: self._is_up) if config.health_socket else None
        self._address = ""
        # Made when somebody asks for it.
        self._openapi: bytes | None = None

    @property
    def addresses(self) -> BoundAddresses:
        """See OwnServer; metrics are on the same port."""
        return BoundAddresses(self._address, self._address)

    @property
    def jobs_address(self) -> str:
        """Address of JobsService after `listen`, host:port; empty without --jobs-port."""
        return self._grpc.address if self._grpc is not None else ""

    @property
    def is_draining(self) -> bool:
        """True once a drain has begun."""
        return self._places.is_draining

    @property
    def _is_up(self) -> bool:
        """True while the router serves and this process takes requests."""
        return self._router_serves.is_set() and not self._places.is_draining

    async def listen(self) -> BoundAddresses:
        """Open the port; until `start` returns, /health answers 503."""
        add_process_metrics(self._registry)
        # Like the other processes' metrics.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        if self._health_socket is not None:
            await self._health_socket.open()
        self._address = await self._server.listen()
        _log.info("listening", http=self._address)
        if self._grpc is not None:
            try:
                await self._grpc.listen()
            except StartupError as error:
                raise StartupError(str(error).replace("--port", "--jobs-port"), flag="--jobs-port") from error
        return self.addresses

    async def start(self) -> None:
        """Return once the router serves. Raises StartupError naming --router, --response-store or --job-store."""
        if self._kept is not None:
            await self._kept.open()
        if self._jobs is not None:
            await self._jobs.open()
        if not self._callers.passes_tokens:
            _log.warning("callers' tokens are not passed on: the connection to the router is not encrypted")
        self._health = asyncio.create_task(self._follow_health())
        seconds = self._config.start_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SILENT_SECONDS):
                        await self._router_serves.wait()
                if not self._router_serves.is_set():
                    _log.info("waiting for the router", router=self._config.router, at_most_seconds=seconds)
                await self._router_serves.wait()
        except TimeoutError:
            raise StartupError(
                f"no router at {self._config.router} served within {seconds:g} s", flag="--router"
            ) from None
        if self._jobs is not None:
            self._jobs.start()
        if self._grpc is not None:
            await self._grpc.start()
        _log.info("ready", service=self.name)

    async def stop(self, *, drain: bool = True) -> None:
        """Refuse new requests, wait for live ones within the grace, then close."""
        if drain:
            try:
                async with asyncio.timeout(self._config.drain_grace_seconds):
                    await self._places.drain()
            except TimeoutError:
                _log.warning("drain grace is over, live requests end now", requests=self._places.running)
        self._places.is_draining = True
        if self._background is not None:
            await self._background.close()
        if self._grpc is not None:
            await self._grpc.stop(drain=False)
        await self._server.close(_CLOSE_SECONDS)
        if self._health is not None:
            self._health.cancel()
            await asyncio.gather(self._health, return_exceptions=True)
        self._callers.close()
        if self._jobs is not None:
            await self._jobs.close()
        self._channel.close()
        if self._kept is not None:
            await self._kept.responses.close()
        if self._health_socket is not None:
            await self._health_socket.close()
        if self._tracing is not None:
            # It sends the rest, and waits for that.
            await asyncio.to_thread(self._tracing.close)

    def status_lines(self) -> list[str]:
        """Lines for the start-up print."""
        scheme = "https" if self._config.is_tls else "http"
        address = f"{scheme}://{self._address}"
        lines = [f"chat page at {address}/, OpenAI's API at {address}/v1, router {self._config.router}"]
        return lines if self._grpc is None else [*lines, f"JobsService at {self._grpc.address}"]

    def _goes_first(self, scope: Mapping[str, Any]) -> Turns | None:
        """Return the separate turns of a request that need not wait behind a flood without tokens, else None."""
        if scope["path"] in _PROBES:
            return self._probe_turns
        return self._known_turns if self._callers.is_known(shown_authorization(dict(scope["headers"]))) else None

    async def _follow_health(self) -> None:
        """Keep track of the router's health."""
        # Health needs no token.
        channel = self._channel.for_stubs
        while True:
            with contextlib.suppress(grpc.RpcError):
                async with contextlib.aclosing(watch_health(channel, ROUTER_SERVICE)) as updates:
                    async for is_serving in updates:
                        (self._router_serves.set if is_serving else self._router_serves.clear)()
            self._router_serves.clear()
            await asyncio.sleep(_RETRY_SECONDS)

    def _application(self) -> Starlette:
        door = Door(
            config=self._config,
            callers=self._callers,
            hosts=self._hosts,
            places=self._places,
            bodies=self._bodies,
            body_bounds=self._config.body_bounds,
            parsing=asyncio.Semaphore(1),
            metrics=self._metrics,
            kept=self._kept,
            background=self._background,
            jobs=self._jobs,
        )

        def route(path: str, handler: Handler, method: str) -> Route:
            endpoint = Endpoint(
                path,
                handler,
                door,
                tracer=self._tracing,
                has_body=method == "POST",
                may_be_empty=path in _MAYBE_EMPTY,
                is_upload=method == "POST" and path in _UPLOADS,
                is_public=path in _PUBLIC,
                is_of_both=path in _OF_BOTH,
                errors=_ERRORS.get(path, OPENAI_ERRORS),
            )
            return Route(path, endpoint, methods=[method])

        plain = {
            "/health": self._answer_health,
            # As on the metrics port of the other processes.
            "/healthz": self._answer_alive,
            "/readyz": self._answer_health,
            "/version": self._answer_version,
            "/openapi.json": self._answer_openapi,
            "/metrics": self._answer_metrics,
        }
        origins = list(self._config.allowed_origin)
        browsers = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-penstock-ignored-fields", "retry-after"],
        )
        return Starlette(
            routes=[
                *(route(path, handler, "POST") for path, handler in _POST.items()),
                *(route(path, handler, "GET") for path, handler in _GET.items()),
                *(route(path, handler, "DELETE") for path, handler in _DELETE.items()),
                *(Route(path, handler, methods=["GET"]) for path, handler in plain.items()),
                *page_routes(),
            ],
            middleware=[browsers] if origins else [],
            exception_handlers={404: self._no_route, 405: self._no_method},
        )

    async def _answer_health(self, request: Request) -> Response:
        """Answer 200 while the router serves and this process takes requests, else 503."""
        return _json({"status": "ok"}, 200) if self._is_up else _json({"status": "unavailable"}, 503)

    async def _answer_alive(self, request: Request) -> Response:
        return _json({"status": "ok"}, 200)

    async def _answer_version(self, request: Request) -> Response:
        return _json({"version": __version__}, 200)

    async def _answer_openapi(self, request: Request) -> Response:
        if self._openapi is None:
            self._openapi = await asyncio.to_thread(openapi_json, ROUTES)
        return Response(self._openapi, media_type="application/json")

    async def _answer_metrics(self, request: Request) -> Response:
        if self._tokens is not None and not self._tokens.accepts(request.headers.get("authorization")):
            error = HttpError(401, "/metrics needs a bearer token of --metrics-token-file", reason="UNAUTHENTICATED")
            return Response(OPENAI_ERRORS.body(error, {}), 401, {"www-authenticate": "Bearer"}, "application/json")
        host = request.headers.get("host", "").encode("latin-1")
        if self._tokens is None and not self._hosts.accepts(host):
            return Response(OPENAI_ERRORS.body(foreign_host(), {}), 421, media_type="application/json")
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"content-type": content_type})

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
        return Response(OPENAI_ERRORS.body(error, {}), status, shown, "application/json")


def _json(value: object, status: int) -> Response:
    return Response(dumps(value), status, media_type="application/json")


def _client_config(config: GatewayConfig) -> ClientConfig:
    """The client's side of the configuration. Raises StartupError for an unreadable token file."""
    token = None
    if config.channel_token_file is not None:
        tokens = TokenFile(config.channel_token_file, "--channel-token-file")
        token = tokens.authorization().partition(" ")[2]
    # It opens no channel of its own: this only makes sure that a token never travels without TLS.
    return ClientConfig(tls=TLSConfig() if config.is_channel_tls else None, token=token, call_metadata=call_metadata)
