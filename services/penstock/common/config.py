"""Configuration that every process has."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from penstock.common.environment import current_environment
from penstock.common.errors import StartupError
from penstock.common.log_limits import LineBounds
from penstock.common.options import load, option
from penstock.common.ports import NEXT_METRICS_PORTS

NETWORK, SECURITY, LIMITS, LOGGING = "Network", "TLS and authentication", "Limits", "Logging"
TRACING = "Tracing"
# Beginning of an endpoint that is a file.
FILE_ENDPOINT = "file:"
CHANNELS = "Connections to other services"

C = TypeVar("C")


def _port_or_auto(text: str) -> int | None:
    """Parse a port; None for `auto`. Raises ValueError."""
    if text.strip().lower() == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected a whole number or auto") from None


def metrics_port_option(usual: int) -> Any:
    """Make the field `metrics_port` of a service with a usual port."""
    first, last = NEXT_METRICS_PORTS[0], NEXT_METRICS_PORTS[-1]
    return option(
        None,
        f"Port of the Prometheus endpoint; auto: {usual}, or if it is taken the first free one of {first} to {last}; "
        "0 takes a free one, -1 has none.",
        group=NETWORK,
        minimum=-1,
        maximum=65535,
        metavar="INT|auto",
        parse=_port_or_auto,
    )


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """Configuration of both ends of a connection."""

    max_message_bytes: int = option(16 << 20, "Largest message sent or received.", group=LIMITS, minimum=1024)
    keepalive_seconds: float = option(
        30.0, "Interval of pings on a silent connection, which detect a dead one.", group=NETWORK, minimum=0.05
    )
    keepalive_timeout_seconds: float = option(
        10.0, "Time for a ping to be answered; then the connection is closed.", group=NETWORK, minimum=0.05
    )


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """Configuration of a process that listens, whatever its protocol."""

    host: str = option("127.0.0.1", "Address to listen on.", group=NETWORK)
    event_loop: Literal["auto", "uvloop", "asyncio"] = option(
        "auto",
        "auto: uvloop where it is installed and the process does not listen with TLS, else asyncio.",
        group=NETWORK,
    )
    drain_grace_seconds: float = option(30.0, "Time for running work to finish after SIGTERM.", group=LIMITS, minimum=0)
    tls_cert: str | None = option(None, "Certificate chain (PEM): serve TLS.", group=SECURITY, metavar="FILE")
    tls_key: str | None = option(None, "Private key of --tls-cert (PEM).", group=SECURITY, metavar="FILE")
    tls_client_ca: str | None = option(
        None, "Clients must show a certificate of this CA (PEM).", group=SECURITY, metavar="FILE"
    )
    health_socket: str | None = option(
        None,
        "Unix socket that answers each connection with SERVING or NOT_SERVING: for a container's own check, whether "
        "the ports have TLS or not.",
        group=NETWORK,
        metavar="PATH",
    )
    insecure_bind: bool = option(False, "Allow plaintext on an address other than loopback.", group=SECURITY)
    log_format: Literal["auto", "json", "console"] = option(
        "auto",
        "auto: console on a terminal, else JSON. With JSON, stderr gets nothing but JSON lines.",
        group=LOGGING,
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Least severe level written.", group=LOGGING
    )
    debug: bool = option(False, "Tracebacks and exception texts on errors.", group=LOGGING)
    log_lines: int = option(
        LineBounds.lines,
        "Lines of one kind (one event of one part of the code, with one exception) in --log-seconds; the log then "
        "counts the rest. 0: no limit.",
        group=LOGGING,
        minimum=0,
    )
    log_seconds: float = option(LineBounds.seconds, "Period of --log-lines.", group=LOGGING, minimum=1.0)
    tracing_endpoint: str | None = option(
        None,
        "Send traces to this OTLP/HTTP collector (http://host:4318), or append them to a file (file:PATH). Needs "
        "penstock[tracing].",
        group=TRACING,
        metavar="URL",
    )
    tracing_sample_ratio: float = option(
        1.0,
        "Share kept of the traces that begin here; a caller's traceparent decides for its own traces.",
        group=TRACING,
        minimum=0.0,
        maximum=1.0,
    )
    tracing_service_name: str | None = option(
        None, "service.name of the spans; by default penstock- and the service's role.", group=TRACING, metavar="NAME"
    )
    tracing_max_spans: int = option(4096, "Spans that wait to be sent; more are dropped.", group=TRACING, minimum=16)
    tracing_export_seconds: float = option(2.0, "Interval at which ended spans are sent.", group=TRACING, minimum=0.01)
    tracing_timeout_seconds: float = option(
        5.0, "Time for the collector to take spans, retries included.", group=TRACING, minimum=0.1
    )
    tracing_file_bytes: int = option(
        256 << 20, "Largest file of traces; further spans are dropped.", group=TRACING, minimum=4096
    )

    @property
    def log_bounds(self) -> LineBounds:
        """Bounds on log lines of one kind."""
        return LineBounds(self.log_lines, self.log_seconds)

    @property
    def is_tls(self) -> bool:
        return self.tls_cert is not None

    def validate(self) -> None:
        """Check the options together. Subclasses call super().validate() first. Raises StartupError."""
        if (self.tls_cert is None) != (self.tls_key is None):
            missing, given = ("--tls-key", "--tls-cert") if self.tls_cert else ("--tls-cert", "--tls-key")
            raise StartupError(f"{given} needs {missing}", flag=missing)
        if self.tls_client_ca is not None and not self.is_tls:
            raise StartupError("--tls-client-ca needs --tls-cert and --tls-key", flag="--tls-cert")
        endpoint = self.tracing_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://", FILE_ENDPOINT)):
            raise StartupError(
                "--tracing-endpoint must begin with http://, https:// or file:", flag="--tracing-endpoint"
            )
        if not (self.is_tls or self.insecure_bind or is_loopback(self.host)):
            raise StartupError(
                f"refusing plaintext on {self.host}: give --tls-cert and --tls-key, or accept it with --insecure-bind",
                flag="--insecure-bind",
            )


@dataclass(frozen=True, kw_only=True)
class ServerConfig(ProcessConfig, TransportConfig):
    """Configuration of a gRPC server with its metrics endpoint. Port 0 takes a free port."""

    # Tried first when no port is given: --metrics-port auto.
    usual_metrics_port: ClassVar[int] = 0

    port: int = option(0, "gRPC port; 0 takes a free one.", group=NETWORK, minimum=0, maximum=65535)
    metrics_port: int | None = option(
        0, "Port of the Prometheus endpoint; 0 takes a free one, -1 has none.", group=NETWORK, minimum=-1, maximum=65535
    )
    metrics_max_connections: int = option(
        16,
        "Connections to the metrics port at a time; the oldest without a whole request makes room for a new one. "
        "Prometheus and a health checker need two.",
        group=NETWORK,
        minimum=1,
    )
    metrics_request_seconds: float = option(
        10.0,
        "Time for a connection to the metrics port to do its TLS handshake and its request, and for each write to it.",
        group=NETWORK,
        minimum=0.1,
    )
    transport: Literal["asyncio", "grpc"] = option(
        "asyncio",
        "asyncio: Penstock's own HTTP/2, which takes a fraction of the processor time when messages are many and "
        "small; the router also uses it to call the tokenizer and the backends. grpc: grpc.aio.",
        group=NETWORK,
    )
    min_ping_interval_seconds: float = option(
        1.0,
        "Shortest interval of a client's pings on a silent connection; a client that pings more often is cut off.",
        group=NETWORK,
        minimum=0.01,
    )
    max_concurrent_rpcs: int = option(4096, "Calls in flight; more are refused at once.", group=LIMITS, minimum=1)
    connection_rpcs: int = option(
        1024,
        "Calls in flight on one connection; the client is told the limit, and further calls wait for their turn.",
        group=LIMITS,
        minimum=1,
    )
    handshake_seconds: float = option(
        10.0,
        "Time for a connection's TLS handshake and first bytes, and for the request of a health check.",
        group=LIMITS,
        minimum=0.05,
    )
    request_seconds: float = option(
        60.0,
        "Time for the request of a call to arrive; a stream of requests has no such limit.",
        group=LIMITS,
        minimum=0.05,
    )
    anonymous_rpcs: int = option(
        256,
        "Health checks and watches at once on connections that have shown no token yet, besides the calls in flight; "
        "the oldest makes room for a new one.",
        group=LIMITS,
        minimum=1,
    )
    anonymous_rpcs_each: int = option(16, "The same for one connection; more are refused.", group=LIMITS, minimum=1)
    anonymous_connections: int = option(
        256,
        "Connections that have shown no token yet, and again this many in a TLS handshake; one without calls, or the "
        "oldest handshake, makes room for a new one (asyncio transport).",
        group=LIMITS,
        minimum=1,
    )
    anonymous_cpu_share: float = option(
        0.05,
        "Share of one processor that such connections get together; beyond it, those that ask for the most wait "
        "(asyncio transport). Requests without a token to the metrics port get as much.",
        group=LIMITS,
        minimum=0.001,
        maximum=1.0,
    )
    max_message_fields: int = option(
        65536,
        "Fields of one message of a caller, nested ones included; they are counted before any memory is allocated for "
        "them. A list of numbers is one field. A message of a stream of requests may have twice as many.",
        group=LIMITS,
        minimum=1024,
    )
    stream_window_bytes: int = option(
        1 << 20,
        "Bytes that a caller may have in flight in a stream of requests (asyncio transport).",
        group=LIMITS,
        minimum=65535,
        maximum=2**31 - 1,
    )
    connection_window_bytes: int = option(
        16 << 20,
        "Bytes of a connection's requests that no handler has taken; requests beyond them wait for their turn. At "
        "least the largest request (asyncio transport).",
        group=LIMITS,
        minimum=65536,
        maximum=2**31 - 1,
    )
    request_buffer_bytes: int = option(
        64 << 20,
        "The same for all connections together; a request that does not fit is refused (asyncio transport).",
        group=LIMITS,
        minimum=65536,
    )
    write_buffer_bytes: int = option(
        256 << 10,
        "Bytes of answers that wait for a client that does not read (asyncio transport).",
        group=LIMITS,
        minimum=1024,
    )
    idle_frames: int = option(
        2000,
        "Frames that cost work and bring no request (early resets of unanswered calls, settings, priorities); a "
        "connection that sends more in a burst is cut off (asyncio transport). At least the number of calls that may "
        "be in flight, since a client may cancel them all at once.",
        group=LIMITS,
        minimum=16,
    )
    idle_frames_per_second: float = option(
        100.0, "Further such frames a second; each answered call allows four more.", group=LIMITS, minimum=0.0
    )
    early_reset_seconds: float = option(
        1.0,
        "A reset counts as such a frame when its call is unanswered and younger than this.",
        group=LIMITS,
        minimum=0.0,
    )
    auth_token_file: str | None = option(
        None,
        "Callers must send one of the bearer tokens in this file (one a line; re-read on change).",
        group=SECURITY,
        metavar="FILE",
    )

    @property
    def metrics_ports(self) -> Sequence[int]:
        """Ports that the metrics endpoint tries, in order; empty: there is none."""
        if self.metrics_port is None:
            return (self.usual_metrics_port, *NEXT_METRICS_PORTS)
        return (self.metrics_port,) if self.metrics_port >= 0 else ()

    @property
    def receive_limit_bytes(self) -> int:
        """Largest message that a caller may send, in bytes."""
        return self.max_message_bytes


@dataclass(frozen=True, kw_only=True)
class ChannelConfig(TransportConfig):
    """Configuration of calls to other processes; callers inherit it: `RouterConfig(ServerConfig, ChannelConfig)`."""

    channel_tls: bool = option(False, "Use TLS towards other services (system CAs).", group=CHANNELS)
    channel_tls_ca: str | None = option(None, "Use TLS; trust this CA (PEM).", group=CHANNELS, metavar="FILE")
    channel_tls_cert: str | None = option(
        None, "Client certificate for mutual TLS (PEM).", group=CHANNELS, metavar="FILE"
    )
    channel_tls_key: str | None = option(
        None, "Private key of --channel-tls-cert (PEM).", group=CHANNELS, metavar="FILE"
    )
    channel_tls_server_name: str | None = option(
        None, "Name expected in the server's certificate, when it is not the address.", group=CHANNELS
    )
    channel_token_file: str | None = option(
        None, "Send the first bearer token of this file with every call.", group=CHANNELS, metavar="FILE"
    )


def from_env_and_flags(cls: type[C], overrides: Mapping[str, object] | None = None) -> C:
    """Make the configuration `cls` from flags, PENSTOCK_* variables and defaults, and validate it.

    `overrides` is keyed by field name; None means absent, text is parsed. Raises StartupError naming the flag.
    """
    config = load(cls, overrides or {}, current_environment())
    if isinstance(config, ProcessConfig):
        config.validate()
    return config


def is_loopback(host: str) -> bool:
    """True when only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
