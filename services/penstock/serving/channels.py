"""Channels to other services: TLS, bearer token, keepalive, and the request id of the call being handled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, cast

import grpc

from penstock.common.config import ChannelConfig
from penstock.common.credentials import TokenFile, channel_credentials
from penstock.common.request_context import REQUEST_ID_KEY, current_request_id
from penstock.serving.grpc_options import channel_options

Metadata = tuple[tuple[str, str | bytes], ...]
_LOCAL = ChannelConfig()


def open_channel(address: str, config: ChannelConfig = _LOCAL) -> grpc.aio.Channel:
    """A channel to `address` (host:port or a gRPC target). It connects when first used.

    Raises StartupError when a TLS or token file cannot be read.
    """
    options = channel_options(config)
    if config.channel_tls_server_name is not None:
        options.append(("grpc.ssl_target_name_override", config.channel_tls_server_name))
    credentials = channel_credentials(config)
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    return _Channel(channel, _tokens(config))


def call_metadata(config: ChannelConfig) -> Metadata:
    """What a channel adds to every call. Raises StartupError when the token file cannot be read."""
    return _added((), _tokens(config))


def added_metadata(config: ChannelConfig) -> Callable[[Metadata], Metadata]:
    """Puts to a call's metadata what a channel adds. Raises StartupError when the token file cannot be read."""
    tokens = _tokens(config)
    return lambda given: _added(given, tokens)


def _tokens(config: ChannelConfig) -> TokenFile | None:
    return TokenFile(config.channel_token_file, "--channel-token-file") if config.channel_token_file else None


def _added(given: Iterable[tuple[str, str | bytes]], tokens: TokenFile | None) -> Metadata:
    added: list[tuple[str, str | bytes]] = list(given)
    request_id = current_request_id.get()
    if request_id is not None and all(key != REQUEST_ID_KEY for key, _ in added):
        added.append((REQUEST_ID_KEY, request_id))
    if tokens is not None:
        added.append(("authorization", tokens.authorization()))
    return tuple(added)


class _Channel(grpc.aio.Channel):
    """Adds metadata to every call. Not a client interceptor: those put a task and a queue between caller and stream."""

    def __init__(self, inner: grpc.aio.Channel, tokens: TokenFile | None) -> None:
        self._inner = inner
        self._tokens = tokens

    def _with_metadata(self, start: Callable[..., Any]) -> Any:
        def call(*requests: Any, metadata: Any = None, **options: Any) -> Any:
            return start(*requests, metadata=_added(metadata or (), self._tokens), **options)

        return call

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(cast("Any", self._inner.unary_unary(*args, **kwargs)))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(cast("Any", self._inner.unary_stream(*args, **kwargs)))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(cast("Any", self._inner.stream_unary(*args, **kwargs)))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(cast("Any", self._inner.stream_stream(*args, **kwargs)))

    async def __aenter__(self) -> grpc.aio.Channel:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._inner.__aexit__(kind, error, trace)

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()
