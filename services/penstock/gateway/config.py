"""Configuration of the HTTP gateway."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.config import HTTP_PORT, ROUTER_PORT, ChannelConfig, ProcessConfig, option
from penstock.common.errors import StartupError
from penstock.gateway.json_body import BodyBounds

NETWORK, LIMITS, BROWSERS, RESPONSES = "Network", "Limits", "Browsers", "Kept responses"


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ProcessConfig, ChannelConfig):
    """Configuration of the gateway process: OpenAI's HTTP in front of a router."""

    port: int = option(HTTP_PORT, "HTTP port; 0 takes a free one.", group=NETWORK, minimum=0, maximum=65535)
    router: str = option(f"127.0.0.1:{ROUTER_PORT}", "Router to call, host:port.", group=NETWORK, metavar="ADDRESS")
    start_timeout_seconds: float = option(
        60.0, "Time that the router has to be ready at the start.", group=NETWORK, minimum=0.1
    )
    connect_timeout_seconds: float = option(
        10.0, "Time for the router to accept a connection.", group=NETWORK, minimum=0.1
    )
    channel_token_file: str | None = option(
        None,
        "Send the first bearer token of this file for callers that show none; it lets everybody in who reaches the "
        "port. A caller's own token goes before it.",
        group="Connections to other services",
        metavar="FILE",
    )
    metrics_token_file: str | None = option(
        None,
        "/metrics needs one of the bearer tokens in this file (one a line; re-read on change).",
        group="TLS and authentication",
        metavar="FILE",
    )
    allowed_origin: tuple[str, ...] = option(
        (), "Origin whose pages may call from a browser (CORS), * for any; none by default.", group=BROWSERS
    )

    allowed_hosts: tuple[str, ...] = option(
        (),
        "Name by which callers without a token reach this gateway, * for any; addresses and this machine's own names "
        "go without saying. Any other is refused: a browser may have been led here by a page of that name.",
        group=BROWSERS,
        metavar="NAME",
    )

    token_seconds: float = option(
        10.0,
        "A token that the router took needs no question for so long, before its requests are read; the router judges "
        "every request all the same.",
        group=LIMITS,
        minimum=0.0,
    )
    max_known_tokens: int = option(4096, "Tokens of which that is remembered.", group=LIMITS, minimum=1)
    anonymous_connections: int = option(
        512,
        "Connections without an admitted request yet, and as many amid a TLS handshake; the oldest makes room for a "
        "new one.",
        group=LIMITS,
        minimum=1,
    )
    anonymous_connections_each: int = option(
        256, "The same of one address (of IPv6 one /64 network).", group=LIMITS, minimum=1
    )
    anonymous_cpu_share: float = option(
        0.2,
        "Share of a processor that such connections get together once they ask for more; those wait that ask for most.",
        group=LIMITS,
        minimum=0.001,
        maximum=1.0,
    )
    max_body_bytes: int = option(4 << 20, "Largest body of a request.", group=LIMITS, minimum=1024)
    max_bodies_bytes: int = option(
        256 << 20,
        "Bodies of all requests together; one that is not whole makes room for others, the oldest first.",
        group=LIMITS,
        minimum=1024,
    )
    max_body_depth: int = option(
        BodyBounds.most_depth,
        "Lists and objects within each other in a body; tools and variables of chat templates may be nested less deep.",
        group=LIMITS,
        minimum=8,
        maximum=256,
    )
    max_body_values: int = option(
        BodyBounds.most_values, "Values in a body, ids of prompts among them.", group=LIMITS, minimum=1024
    )
    max_body_containers: int = option(
        BodyBounds.most_containers, "Lists and objects in a body.", group=LIMITS, minimum=256
    )
    body_seconds: float = option(60.0, "Time until the body of a request is whole.", group=LIMITS, minimum=0.1)
    max_header_bytes: int = option(64 << 10, "Request line and headers of a request.", group=LIMITS, minimum=1024)
    max_target_bytes: int = option(8 << 10, "Path and query of a request.", group=LIMITS, minimum=1024)
    max_headers: int = option(128, "Headers of a request.", group=LIMITS, minimum=8)
    header_seconds: float = option(
        10.0, "Time for a connection's TLS handshake, and for the headers of a request.", group=LIMITS, minimum=0.1
    )
    idle_seconds: float = option(
        75.0, "A connection without a request is closed after so long.", group=LIMITS, minimum=1.0
    )
    max_connections: int = option(
        2048,
        "Connections at a time; one without a request at work makes room for a new one, the one that has rested the "
        "longest first.",
        group=LIMITS,
        minimum=1,
    )
    max_requests: int = option(
        # Fewer than the calls that a router takes of one connection (--connection-rpcs): questions go over it, too.
        1000,
        "Requests at work at a time; more are refused with 429.",
        group=LIMITS,
        minimum=1,
    )
    tenant_share: float = option(
        0.75,
        "Share of --max-requests that the requests of one token may have, where the router asks for tokens.",
        group=LIMITS,
        minimum=0.01,
        maximum=1.0,
    )
    answer_seconds: float | None = option(
        None, "Deadline of a request, which travels to the engine; none when left out.", group=LIMITS, minimum=0.1
    )
    stalled_reader_seconds: float = option(
        60.0, "A reader of an answer that takes nothing for so long is cut off.", group=LIMITS, minimum=0.1
    )
    answer_window_bytes: int = option(
        64 << 10,
        "Bytes of an answer that may be here, or on their way from the router, before its reader takes them.",
        group=LIMITS,
        minimum=16 << 10,
        maximum=1 << 20,
    )
    max_unsent_bytes: int = option(
        128 << 10,
        "Bytes that may wait in the system for the reader of a connection, besides those on their way (Linux, macOS).",
        group=LIMITS,
        minimum=4096,
        maximum=1 << 30,
    )
    max_prompts: int = option(256, "Prompts of one request of /v1/completions.", group=LIMITS, minimum=1)
    concurrent_prompts: int = option(16, "Of these so many are with the router at once.", group=LIMITS, minimum=1)
    unknown_fields: str = option(
        "report",
        "Fields of a body that nothing reads: report tells them in x-penstock-ignored-fields, and near misses of known "
        "names in the answer's warnings; refuse answers 400.",
        choices=("report", "refuse"),
        group=LIMITS,
    )
    max_ignored_fields: int = option(
        32, "Unknown fields of a request that x-penstock-ignored-fields lists.", group=LIMITS, minimum=0
    )

    response_store: str = option(
        "memory",
        "Where /v1/responses keeps answers that callers build on: memory, off, a file (SQLite) that outlives the "
        "process and belongs to one gateway, or a server of Redis or Valkey that several share "
        "(valkey://HOST:PORT/0, rediss:// with TLS; one with a password belongs into PENSTOCK_RESPONSE_STORE).",
        group=RESPONSES,
        metavar="memory|off|FILE|URL",
    )
    response_store_seconds: float = option(
        2.0, "A shared store that does not answer for so long has failed.", group=RESPONSES, minimum=0.01
    )
    response_store_connections: int = option(
        16, "Connections to a shared store; further calls wait.", group=RESPONSES, minimum=1
    )
    response_seconds: float = option(30 * 86400.0, "Life of a kept response.", group=RESPONSES, minimum=1.0)
    max_responses: int = option(20_000, "Kept responses; the oldest leave.", group=RESPONSES, minimum=1)
    max_response_bytes: int = option(
        64 << 20, "Bytes of the kept responses as JSON; the oldest leave.", group=RESPONSES, minimum=1024
    )

    def validate(self) -> None:
        """Raises StartupError naming the flag."""
        super().validate()
        if self.max_bodies_bytes < self.max_body_bytes:
            raise StartupError("--max-bodies-bytes must be --max-body-bytes or more", flag="--max-bodies-bytes")
        host, _, port = self.router.rpartition(":")
        if not host or not port.isdigit():
            raise StartupError(f"--router {self.router!r}: expected host:port", flag="--router")

    @property
    def body_bounds(self) -> BodyBounds:
        """Bounds on what a body holds, besides its bytes."""
        return BodyBounds(self.max_body_depth, self.max_body_values, self.max_body_containers)

    @property
    def is_channel_tls(self) -> bool:
        """True when calls to the router go through TLS."""
        return bool(self.channel_tls or self.channel_tls_ca or self.channel_tls_cert)
