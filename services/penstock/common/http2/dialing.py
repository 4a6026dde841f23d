"""Opens the streams of common.http2.client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from penstock.common.channels import call_metadata
from penstock.common.config import ChannelConfig
from penstock.common.credentials import channel_tls_context
from penstock.common.http2 import frames
from penstock.common.http2.client import RequestT, ResponseT, StreamCall


async def open_stream(
    address: str,
    method: str,
    parse: Callable[[bytes], ResponseT],
    config: ChannelConfig,
    *,
    timeout: float,
    joins: bool = False,
) -> StreamCall[RequestT, ResponseT]:
    """Call the bidirectional `method` ("/package.Service/Name") at `address` (host:port), on a connection of its own.

    `parse` and `joins` as in StreamCall. Raises grpc.aio.AioRpcError (UNAVAILABLE) when nobody answers within `timeout`
    seconds, StartupError when a TLS or token file cannot be read.
    """
    host, _, port = address.rpartition(":")
    host, tls = host.strip("[]"), channel_tls_context(config)
    name = config.channel_tls_server_name or host if tls is not None else None
    head = frames.request_headers(
        (
            (":method", "POST"),
            (":scheme", "http" if tls is None else "https"),
            (":path", method),
            (":authority", address if name in (None, host) else name),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "penstock"),
            *call_metadata(config),
        )
    )
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            _, call = await loop.create_connection(
                lambda: StreamCall[RequestT, ResponseT](head, parse, config, joins=joins),
                host,
                int(port),
                ssl=tls,
                server_hostname=name,
            )
    except (OSError, TimeoutError) as error:
        none = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, f"no connection: {error}", None) from error
    return call
