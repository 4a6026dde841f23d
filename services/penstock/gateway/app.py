"""Gateway process: OpenAI's HTTP and a chat page in front of a router; it is a plain client of the router."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, disable_created_metrics
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from typing_extensions import override

from penstock.common.addresses import BoundAddresses
from penstock.common.credentials import TokenFile
from penstock.common.errors import StartupError
from penstock.common.event_loop import running_loop_name
from penstock.common.logging import get_logger
from penstock.common.metrics import add_process_metrics
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
from penstock.gateway.endpoint import Door, Endpoint, Handler, shown_authorization
from penstock.gateway.file_routes import create_file, delete_file, get_file, get_file_content, list_files
from penstock.gateway.fixed_paths import AsgiApp, FixedPaths
from penstock.gateway.http_errors import (
    ANTHROPIC_ERRORS,
    OPENAI_ERRORS,
    RESPONSE_ERRORS,
    ErrorShape,
)
from penstock.gateway.http_server import HttpServer
from penstock.gateway.job_rights import JobRights
from penstock.gateway.jobs import Jobs
from penstock.gateway.jobs_port import JobsPort, port_config
from penstock.gateway.kept_stores import open_stores
from penstock.gateway.line_answers import JobClients, LineAnswers
from penstock.gateway.messages import count_tokens, messages
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.openapi import Routes
from penstock.gateway.places import BodyBytes, Places
from penstock.gateway.plain_pages import PROBES, PlainPages
from penstock.gateway.request_head import TrustedHosts
from penstock.gateway.request_log import request_log
from penstock.gateway.responses import (
    cancel_response,
    compact_response,
    count_input_tokens,
    delete_response,
    get_response,
    list_input_items,
    responses,
)
from penstock.gateway.router_link import RouterLink
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
from penstock.serving.health_socket import HealthSocket
from penstock.serving.server import OwnServer, RunningServer, open_tracing

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
_PROBE_SECONDS, _SAVED_SECONDS = 0.0002, 0.05
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
# Paths of those who wait for no answer of a model.
_JOBS = ("/v1/files", "/v1/batches")
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
        self._router = RouterLink(config)
        self._callers = Callers(self._router.client, config)
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
            clients = JobClients(self._router.client, config.job_token_file)
            lines = LineAnswers(config, clients.next, _POST, self._kept)
            self._jobs = Jobs(config, self._metrics, lines.answer, JobRights(clients.next), config.max_body_bytes)
            if config.jobs_port >= 0:
                port = JobsPort(config, self._jobs, self._callers, self._places)
                self._grpc = RunningServer(port, port_config(config), registry)
        self._probe_turns = Turns(config.anonymous_cpu_share, _PROBE_SECONDS, _SAVED_SECONDS)
        # The most that may come: they are admitted in a moment.
        self._known_turns = Turns(1.0, 0.0, 0.0)
        token_file = config.metrics_token_file
        self._pages = PlainPages(
            ROUTES,
            self._registry,
            self._metrics,
            self._hosts,
            is_up=lambda: self._is_up,
            tokens=TokenFile(token_file, "--metrics-token-file") if token_file else None,
        )
        self._server = HttpServer(
            self._application(),
            config,
            self._goes_first,
            # Other origins' pages need what the middleware adds.
            answer_at_once=(lambda _: None) if config.allowed_origin else self._pages.answer_at_once,
            on_turned_away=lambda status: self._metrics.requests("other", str(status)).inc(),
            on_evicted=self._metrics.evicted.inc,
        )
        self._show_figures()
        self._health_socket = HealthSocket(config.health_socket, lambda: self._is_up) if config.health_socket else None
        self._address = ""

    def _show_figures(self) -> None:
        """Let the metrics that count what there is now read it."""
        shown, kept = self._metrics, self._kept
        shown.running.set_function(lambda: self._places.running)
        shown.connections.set_function(lambda: self._server.connections)
        shown.strangers.set_function(lambda: self._server.strangers)
        shown.body_bytes.set_function(lambda: self._bodies.held)
        if kept is not None:
            shown.responses.set_function(lambda: kept.responses.num_responses)
            shown.response_bytes.set_function(lambda: kept.responses.num_bytes)
            shown.conversations.set_function(lambda: kept.conversations.num_conversations)
            shown.conversation_bytes.set_function(lambda: kept.conversations.num_bytes)

    @property
    @override
    def addresses(self) -> BoundAddresses:
        """Metrics are on the same port."""
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
        return self._router.is_serving and not self._places.is_draining

    async def listen(self) -> BoundAddresses:
        """Open the port; until `start` returns, /health answers 503."""
        add_process_metrics(self._registry)
        # Like the other processes' metrics.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        if self._health_socket is not None:
            await self._health_socket.open()
        self._address = await self._server.listen()
        _log.info("listening", http=self._address, event_loop=running_loop_name())
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
        await self._router.wait_serving()
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
        await self._router.stop_following()
        self._callers.close()
        if self._jobs is not None:
            await self._jobs.close()
        self._router.close()
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
        if scope["path"] in PROBES:
            return self._probe_turns
        return self._known_turns if self._callers.is_known(shown_authorization(dict(scope["headers"]))) else None

    def _application(self) -> AsgiApp:
        door = Door(
            config=self._config,
            callers=self._callers,
            hosts=self._hosts,
            places=self._places,
            bodies=self._bodies,
            body_bounds=self._config.body_bounds,
            parsing=asyncio.Semaphore(1),
            metrics=self._metrics,
            log=request_log(),
            kept=self._kept,
            background=self._background,
            jobs=self._jobs,
        )

        fixed: dict[tuple[str, str], AsgiApp] = {}

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
                makes_jobs=path.startswith(_JOBS),
                errors=_ERRORS.get(path, OPENAI_ERRORS),
            )
            if "{" not in path:
                fixed[method, path] = endpoint
            return Route(path, endpoint, methods=[method])

        origins = list(self._config.allowed_origin)
        browsers = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-penstock-ignored-fields", "retry-after"],
        )
        routed = Starlette(
            routes=[
                *(route(path, handler, "POST") for path, handler in _POST.items()),
                *(route(path, handler, "GET") for path, handler in _GET.items()),
                *(route(path, handler, "DELETE") for path, handler in _DELETE.items()),
                *self._pages.routes(),
                *page_routes(),
            ],
            middleware=[browsers] if origins else [],
            exception_handlers=self._pages.refusals(),
        )
        # The same with requests on their straight way.
        return routed if origins else FixedPaths(fixed, routed)
