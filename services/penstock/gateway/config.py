"""Configuration of the HTTP gateway."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.config import ChannelConfig, ProcessConfig, is_loopback
from penstock.common.errors import StartupError
from penstock.common.options import option
from penstock.common.ports import HTTP_PORT, ROUTER_PORT
from penstock.gateway.json_body import BodyBounds
from penstock.jobs.job_options import JobOptions

NETWORK, LIMITS, BROWSERS, RESPONSES = "Network", "Limits", "Browsers", "Kept responses"


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ProcessConfig, ChannelConfig, JobOptions):
    """Configuration of the gateway process: OpenAI's HTTP in front of a router."""

    port: int = option(HTTP_PORT, "HTTP port; 0 takes a free one.", group=NETWORK, minimum=0, maximum=65535)
    jobs_port: int = option(
        -1,
        "gRPC port of JobsService, the batches of --job-store over gRPC; 0 takes a free one, -1 has none.",
        group=NETWORK,
        minimum=-1,
        maximum=65535,
    )
    router: str = option(f"127.0.0.1:{ROUTER_PORT}", "Router to call, host:port.", group=NETWORK, metavar="ADDRESS")
    start_timeout_seconds: float = option(
        60.0, "Time for the router to be ready at the start.", group=NETWORK, minimum=0.1
    )
    connect_timeout_seconds: float = option(
        10.0, "Time for the router to accept a connection.", group=NETWORK, minimum=0.1
    )
    channel_token_file: str | None = option(
        None,
        "Send the first bearer token of this file for callers without one: it lets in everybody who reaches the port. "
        "A caller's own token takes precedence.",
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
        (), "Origin that a calling page in a browser may have (CORS), * for any; none by default.", group=BROWSERS
    )

    allowed_hosts: tuple[str, ...] = option(
        (),
        "Name by which callers without a token may reach this gateway, * for any; addresses and this machine's own "
        "names are always allowed. Any other name is refused: a page of that name may have led a browser here.",
        group=BROWSERS,
        metavar="NAME",
    )

    token_seconds: float = option(
        10.0,
        "Time for which a token that the router accepted is not checked again before its requests are read. The router "
        "still checks every request.",
        group=LIMITS,
        minimum=0.0,
    )
    max_known_tokens: int = option(4096, "Accepted tokens that are remembered.", group=LIMITS, minimum=1)
    anonymous_connections: int = option(
        512,
        "Connections without an admitted request yet, and again this many in a TLS handshake; the oldest makes room "
        "for a new one.",
        group=LIMITS,
        minimum=1,
    )
    anonymous_connections_each: int = option(
        256, "The same for one address (one /64 network of IPv6).", group=LIMITS, minimum=1
    )
    anonymous_cpu_share: float = option(
        0.2,
        "Share of one processor that such connections get together; beyond it, those that ask for the most wait. Over "
        "TLS the handshakes of one address get half as much, and beyond it each waits some 0.2 s.",
        group=LIMITS,
        minimum=0.001,
        maximum=1.0,
    )
    max_body_bytes: int = option(4 << 20, "Largest body of a request.", group=LIMITS, minimum=1024)
    max_bodies_bytes: int = option(
        256 << 20,
        "Bodies of all requests together; incomplete ones make room for others, the oldest first.",
        group=LIMITS,
        minimum=1024,
    )
    max_body_depth: int = option(
        BodyBounds.most_depth,
        "Nesting depth of lists and objects in a body; the limit for tools and variables of chat templates is lower.",
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
    body_seconds: float = option(60.0, "Time for the body of a request to arrive.", group=LIMITS, minimum=0.1)
    max_header_bytes: int = option(64 << 10, "Request line and headers of a request.", group=LIMITS, minimum=1024)
    max_target_bytes: int = option(8 << 10, "Path and query of a request.", group=LIMITS, minimum=1024)
    max_headers: int = option(128, "Headers of a request.", group=LIMITS, minimum=8)
    header_seconds: float = option(
        10.0, "Time for a connection's TLS handshake, and for the headers of a request.", group=LIMITS, minimum=0.1
    )
    idle_seconds: float = option(
        75.0, "Time after which a connection without a request is closed.", group=LIMITS, minimum=1.0
    )
    max_connections: int = option(
        2048,
        "Connections at a time. A connection without a request in progress makes room for a new one, the longest idle "
        "first.",
        group=LIMITS,
        minimum=1,
    )
    max_requests: int = option(
        # Fewer than the calls that a router takes on one connection (--connection-rpcs): token checks use it, too.
        1000,
        "Requests in progress at a time; more are refused with 429.",
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
        None, "Deadline of a request, passed on to the engine; none when left out.", group=LIMITS, minimum=0.1
    )
    stalled_reader_seconds: float = option(
        60.0, "A reader that takes nothing of its answer for this long is cut off.", group=LIMITS, minimum=0.1
    )
    answer_window_bytes: int = option(
        64 << 10,
        "Bytes of an answer that may wait here, or be on their way from the router, until its reader takes them.",
        group=LIMITS,
        minimum=16 << 10,
        maximum=1 << 20,
    )
    max_unsent_bytes: int = option(
        128 << 10,
        "Bytes that may wait in the kernel for the reader of a connection, besides those in flight (Linux, macOS).",
        group=LIMITS,
        minimum=4096,
        maximum=1 << 30,
    )
    max_prompts: int = option(256, "Prompts of one request of /v1/completions.", group=LIMITS, minimum=1)
    concurrent_prompts: int = option(
        16, "Prompts of one such request that are with the router at once.", group=LIMITS, minimum=1
    )
    unknown_fields: str = option(
        "report",
        "Fields of a body that nothing reads. report: x-penstock-ignored-fields lists them, and the answer's warnings "
        "name those close to a known name; refuse: the answer is 400.",
        choices=("report", "refuse"),
        group=LIMITS,
    )
    max_ignored_fields: int = option(
        32, "Unknown fields of a request that x-penstock-ignored-fields lists.", group=LIMITS, minimum=0
    )

    response_store: str = option(
        "memory",
        "Place where /v1/responses keeps answers for callers to build on: memory, off, a file (SQLite) that outlives "
        "the process and belongs to one gateway, or a Redis or Valkey server that several gateways share "
        "(valkey://HOST:PORT/0, rediss:// for TLS; put an address with a password into PENSTOCK_RESPONSE_STORE).",
        group=RESPONSES,
        metavar="memory|off|FILE|URL",
    )
    response_store_seconds: float = option(
        2.0, "A shared store has failed when it does not answer for this long.", group=RESPONSES, minimum=0.01
    )
    response_store_connections: int = option(
        16, "Connections to a shared store; further calls wait.", group=RESPONSES, minimum=1
    )
    response_seconds: float = option(30 * 86400.0, "Time that a response is kept.", group=RESPONSES, minimum=1.0)
    max_responses: int = option(20_000, "Responses kept; the oldest go first.", group=RESPONSES, minimum=1)
    max_response_bytes: int = option(
        64 << 20, "Bytes of the kept responses as JSON; the oldest go first.", group=RESPONSES, minimum=1024
    )

    max_conversations: int = option(
        20_000,
        "Conversations kept (/v1/conversations); those that nobody changed for the longest time go first.",
        group=RESPONSES,
        minimum=1,
    )
    max_conversation_bytes: int = option(
        64 << 20,
        "Bytes of the kept conversations as JSON; one has at most --max-body-bytes.",
        group=RESPONSES,
        minimum=1024,
    )
    conversations_share: float = option(
        0.5,
        "Share of --max-conversations and of --max-conversation-bytes that one token may have; beyond it, writes are "
        "refused with 429.",
        group=RESPONSES,
        minimum=0.01,
        maximum=1.0,
    )
    conversation_seconds: float = option(
        30 * 86400.0, "Time that a conversation is kept after its last change.", group=RESPONSES, minimum=1.0
    )
    max_background: int = option(
        256,
        "Responses in progress with background true; each also has one of --max-requests, and one token at most "
        "--tenant-share of them. More are refused with 429.",
        group=RESPONSES,
        minimum=1,
    )
    background_event_bytes: int = option(
        64 << 20,
        "Events of streamed responses in the background that may be read again; the oldest responses' go first.",
        group=RESPONSES,
        minimum=64 << 10,
    )
    background_event_seconds: float = option(
        600.0, "Time for which these events are kept after a response's end.", group=RESPONSES, minimum=0.0
    )
    background_sign_seconds: float = option(
        6.0,
        "A response in the background has failed when its gateway gives no sign of life for this long. For a shared "
        "store; a cancel at another gateway takes up to a third of it.",
        group=RESPONSES,
        minimum=0.3,
    )

    def validate(self) -> None:
        """Raises StartupError naming the flag."""
        super().validate()
        if self.max_bodies_bytes < self.max_body_bytes:
            raise StartupError("--max-bodies-bytes must be --max-body-bytes or more", flag="--max-bodies-bytes")
        host, _, port = self.router.rpartition(":")
        if not host or not port.isdigit():
            raise StartupError(f"--router {self.router!r}: expected host:port", flag="--router")
        if self.jobs_port >= 0 and not self.has_jobs:
            raise StartupError("--jobs-port serves batches, and --job-store is off", flag="--jobs-port")
        if self.job_token_file is not None and not (self.is_channel_tls or is_loopback(host)):
            raise StartupError(
                "--job-token-file needs --channel-tls for a router that is not loopback", flag="--job-token-file"
            )

    @property
    def body_bounds(self) -> BodyBounds:
        """Bounds on the contents of a body, besides its bytes."""
        return BodyBounds(self.max_body_depth, self.max_body_values, self.max_body_containers)

    @property
    def is_channel_tls(self) -> bool:
        """True when calls to the router go through TLS."""
        return bool(self.channel_tls or self.channel_tls_ca or self.channel_tls_cert)
