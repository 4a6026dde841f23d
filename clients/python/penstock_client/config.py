"""Configuration of connection, retries and timeouts. Frozen dataclasses; every default is here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from penstock.common.proxies import proxy_options


@dataclass(frozen=True, slots=True)
class TLSConfig:
    """TLS of the connection. With all fields None the system's roots verify the server."""

    # PEM bundle that verifies the server's certificate.
    ca_file: Path | None = None
    # Client certificate chain and key (PEM), for mutual TLS: both or neither.
    cert_file: Path | None = None
    key_file: Path | None = None
    # Name expected in the server's certificate, if it differs from the address.
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Channel credentials. Raises ValueError for half a key pair and OSError for an unreadable file."""
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("TLSConfig: cert_file and key_file go together")
        read = [path.read_bytes() if path else None for path in (self.ca_file, self.key_file, self.cert_file)]
        return grpc.ssl_channel_credentials(*read)


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """Retries of UNAVAILABLE before the first event. Nothing is ever retried after that."""

    # Tries altogether.
    max_attempts: int = 3
    # Seconds before the second try; doubled for each further one, up to max_backoff, then jittered by a half.
    initial_backoff: float = 0.1
    max_backoff: float = 2.0


@dataclass(frozen=True, slots=True)
class KeepAliveConfig:
    """HTTP/2 pings that detect a dead peer on a quiet connection. Seconds."""

    # Between pings. Penstock's servers accept one every 10 s.
    interval: float = 30.0
    # Until an unanswered ping closes the connection.
    timeout: float = 10.0


@dataclass(frozen=True, slots=True)
class TimeoutConfig:
    """Seconds, None for no limit. A call's own `timeout` argument wins."""

    # Until the connection is up, for `wait_ready`.
    connect: float = 10.0
    # A whole generation; sent to the server as the gRPC deadline.
    generate: float | None = None
    # Every other call.
    unary: float | None = 30.0


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Configuration of a client."""

    tls: TLSConfig | None = None
    # Bearer token; sent only when the connection is TLS or to a loopback address.
    token: str | None = None
    retry: RetryConfig = field(default_factory=RetryConfig)
    keepalive: KeepAliveConfig = field(default_factory=KeepAliveConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    # Largest message accepted, in bytes.
    max_receive_bytes: int = 4 << 20
    # Prompts of one `generate_many` that are with the server at once.
    max_concurrent_prompts: int = 16
    # Function that is called for each call: it returns more metadata, such as the caller's W3C trace context
    # (traceparent).
    call_metadata: Callable[[], Iterable[tuple[str, str]]] = tuple

    def channel_options(self, address: str = "") -> list[tuple[str, str | int]]:
        """gRPC channel arguments of this configuration; `address` is the server's, which decides on a proxy."""
        options: list[tuple[str, str | int]] = [
            ("grpc.keepalive_time_ms", int(self.keepalive.interval * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keepalive.timeout * 1000)),
            ("grpc.max_receive_message_length", self.max_receive_bytes),
            # Retries are this client's: gRPC's own would not know whether an event had arrived.
            ("grpc.enable_retries", 0),
            *proxy_options(address),
        ]
        if self.tls and self.tls.server_name:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options

    def metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """Call metadata. Raises ValueError for an invalid token, or for a token without TLS to another machine."""
        if self.token is None:
            return ()
        if not self.token.strip() or self.token != self.token.strip() or not self.token.isascii():
            raise ValueError("ClientConfig.token must be a token without spaces around it; None sends none")
        if not self.token.isprintable():
            raise ValueError("ClientConfig.token has characters that are not allowed")
        host = address.rsplit(":", 1)[0].removeprefix("dns:///").strip("[]")
        if self.tls is None and host not in ("localhost", "127.0.0.1", "::1") and not address.startswith("unix:"):
            raise ValueError("ClientConfig.token needs ClientConfig.tls for an address that is not loopback")
        return (("authorization", f"Bearer {self.token}"),)
