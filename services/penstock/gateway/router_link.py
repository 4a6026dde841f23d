"""Connection of a gateway to its router: one channel, the client of all routes, and whether the router serves."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
from penstock_client import AsyncClient, ClientConfig, TLSConfig

from penstock.common.config import is_loopback
from penstock.common.credentials import TokenFile, channel_tls_context, check_channel_files
from penstock.common.errors import StartupError
from penstock.common.kept_running import kept_running
from penstock.common.logging import get_logger
from penstock.gateway.config import GatewayConfig
from penstock.gateway.endpoint import call_metadata
from penstock.http2.channel import Http2Channel
from penstock.serving.channels import watch_health

ROUTER_SERVICE = "penstock.v1.TextService"
# Seconds between attempts to watch the router's health.
_RETRY_SECONDS = 0.5
# Seconds of waiting for the router after which a start logs it.
_SILENT_SECONDS = 3.0
_log = get_logger("penstock.gateway")


class RouterLink:
    """The router of one gateway. Belongs to one event loop."""

    def __init__(self, config: GatewayConfig) -> None:
        """Make it without a connection. Raises StartupError naming the flag of a bad file."""
        self._config = config
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
            self.client = AsyncClient(config.router, _client_config(config), channel=self._channel.for_stubs)
        except ValueError as error:
            if config.is_channel_tls or is_loopback(config.router.rpartition(":")[0]):
                raise StartupError(
                    "--channel-token-file must hold a token, without spaces in it", flag="--channel-token-file"
                ) from error
            raise StartupError(
                "--channel-token-file needs --channel-tls for a router that is not loopback", flag="--channel-tls"
            ) from error
        self._serves = asyncio.Event()
        self._health: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        """True while the router's health says so."""
        return self._serves.is_set()

    async def wait_serving(self) -> None:
        """Return once the router serves, and follow its health from then on. Raises StartupError naming --router."""
        self._health = asyncio.create_task(kept_running(self._follow_health, _log, "health", _RETRY_SECONDS))
        router, seconds = self._config.router, self._config.start_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SILENT_SECONDS):
                        await self._serves.wait()
                if not self.is_serving:
                    _log.info("waiting for the router", router=router, at_most_seconds=seconds)
                await self._serves.wait()
        except TimeoutError:
            raise StartupError(f"no router at {router} served within {seconds:g} s", flag="--router") from None

    async def stop_following(self) -> None:
        """Leave the router's health alone. Calls go on."""
        if self._health is not None:
            self._health.cancel()
            await asyncio.gather(self._health, return_exceptions=True)

    def close(self) -> None:
        """Disconnect."""
        self._channel.close()

    async def _follow_health(self) -> None:
        # Health needs no token.
        channel = self._channel.for_stubs
        while True:
            self._serves.clear()
            with contextlib.suppress(grpc.RpcError):
                async with contextlib.aclosing(watch_health(channel, ROUTER_SERVICE)) as updates:
                    async for is_serving in updates:
                        (self._serves.set if is_serving else self._serves.clear)()
            self._serves.clear()
            await asyncio.sleep(_RETRY_SECONDS)


def _client_config(config: GatewayConfig) -> ClientConfig:
    """The client's side of the configuration. Raises StartupError for an unreadable token file."""
    token = None
    if config.channel_token_file is not None:
        tokens = TokenFile(config.channel_token_file, "--channel-token-file")
        token = tokens.authorization().partition(" ")[2]
    # It opens no channel of its own: this only makes sure that a token never travels without TLS.
    return ClientConfig(tls=TLSConfig() if config.is_channel_tls else None, token=token, call_metadata=call_metadata)
