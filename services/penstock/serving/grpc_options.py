"""Options of grpc for all of Penstock's servers and channels.

grpc silently ignores a misspelt name, so tests show that each has an effect.
"""

from __future__ import annotations

from penstock.common.config import ServerConfig, TransportConfig
from penstock.http2.metadata import MAX_METADATA_BYTES

Options = list[tuple[str, int | str]]
# Bytes that may lie unread on a stream with a writer that joins what waits: some ten steps of some dozens of requests.
_JOINING_WINDOW_BYTES = 4096


def _common(config: TransportConfig, receive_bytes: int) -> Options:
    return [
        ("grpc.max_receive_message_length", receive_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.keepalive_time_ms", int(config.keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", int(config.keepalive_timeout_seconds * 1000)),
        # This one closes a connection with unanswered pings: after a minute by default, whatever is set above.
        ("grpc.http2.ping_timeout_ms", int(config.keepalive_timeout_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # Pings on a long quiet stream (a queued request, a slow prefill) are not limited to two.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ]


def server_options(config: ServerConfig, *, shares_port: bool = False) -> Options:
    """Options for `grpc.aio.server`. `shares_port`: other workers of this service listen on the port, too."""
    return [
        *_common(config, config.receive_limit_bytes),
        # Two unrelated servers on one port would each get half of the calls, so a taken port must be an error.
        ("grpc.so_reuseport", int(shares_port)),
        ("grpc.max_concurrent_streams", config.connection_rpcs),
        ("grpc.server_handshake_timeout_ms", int(config.handshake_seconds * 1000)),
        # Least time between a client's pings; more frequent ones end in GOAWAY too_many_pings. grpc's default: five
        # minutes.
        ("grpc.http2.min_ping_interval_without_data_ms", int(config.min_ping_interval_seconds * 1000)),
    ]


def channel_options(config: TransportConfig) -> Options:
    """Options for a `grpc.aio` channel."""
    return [
        *_common(config, config.max_message_bytes),
        # Without it channels with equal options share one connection, and thus one flow-control window and one core.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name this is the time for an attempt to connect, up to the peer's first frame. A far or
        # busy peer needs more than the 100 ms between attempts.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]


def joining_options(config: TransportConfig) -> Options:
    """Options for the channel of one stream with a writer that joins what waits for its reader.

    Such a writer has to notice that the reader is behind. In the usual window (64 KiB, or more once grpc has measured
    the connection) a hundred small messages may lie between the two, and each waits for all before it.
    """
    return [
        *channel_options(config),
        ("grpc.http2.lookahead_bytes", _JOINING_WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),
    ]
