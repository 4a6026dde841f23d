"""Link to one generation backend: the connection, whether the process belongs here, and the backend's state."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import grpc

from penstock.common.errors import PenstockError, StartupError, Unavailable
from penstock.common.logging import get_logger
from penstock.router.backend_targets import is_address, service_of, split_target
from penstock.router.backends.discovery import BackendAddress
from penstock.router.config import RouterConfig
from penstock.router.engines.backend_connection import BackendConnection
from penstock.router.engines.backend_kinds import connect
from penstock.serving.transport import Channel, make_transport
from penstock.v1 import model_pb2, tokenizer_pb2

# Statuses that a call gets when its connection ends.
_BROKEN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.CANCELLED,
)
_log = get_logger("penstock.router")


class BackendState(enum.Enum):
    """State of a backend: CONNECTING until first ready and after a loss; DRAINING takes nothing new."""

    CONNECTING = 1
    READY = 2
    DRAINING = 3
    MISMATCH = 4


class LinkLost(Exception):
    """Loss of the connection; the message is for the log."""


class Link:
    """Connection to one backend, made again whenever it ends. Belongs to one event loop."""

    def __init__(
        self,
        where: BackendAddress,
        config: RouterConfig,
        *,
        tokenizer: Callable[[], tokenizer_pb2.GetTokenizerResponse],
        serve: Callable[[Channel, BackendConnection, model_pb2.GetModelInfoResponse], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        """Make it; `run` connects.

        `tokenizer` returns the facts of ours. `serve` is awaited on every connection to a process that serves a model
        of it, until it raises LinkLost or the transport's error. `on_change`: the state changed.
        """
        self.key = where.address
        self._target = where.target
        self._config = config
        self._channel_config = _named(config, where.target)
        self._transport = make_transport(config)
        self._tokenizer = tokenizer
        self._serve = serve
        self._on_change = on_change
        self._state = BackendState.CONNECTING
        self._info: model_pb2.GetModelInfoResponse | None = None
        self._is_starting = False
        self._is_healthy = False
        # The present connection, also to a process that is not ready; None between two.
        self._channel: Channel | None = None
        # True while `serve` is at work on it.
        self._is_served = False

    @property
    def state(self) -> BackendState:
        """State of the backend."""
        return self._state

    @property
    def is_ready(self) -> bool:
        """True while it takes requests."""
        return self._state is BackendState.READY

    @property
    def is_up(self) -> bool:
        """True while it may have requests of ours."""
        return self._state in (BackendState.READY, BackendState.DRAINING)

    @property
    def info(self) -> model_pb2.GetModelInfoResponse | None:
        """Facts of the model, as told on the last connection; None before the first."""
        return self._info

    @property
    def is_starting(self) -> bool:
        """True while a process is there that does not serve yet: it loads its model."""
        return self._is_starting

    @property
    def is_healthy(self) -> bool:
        """True while the health of this connection's process is SERVING."""
        return self._is_healthy

    def serves(self, model: str) -> bool:
        """True when the model is of that name, or was when it was last told."""
        return self._info is not None and self._info.model == model

    def show(self, *, takes_work: bool) -> None:
        """Become READY or, once ready, DRAINING."""
        if takes_work:
            self._set_state(BackendState.READY)
        elif self.is_ready:
            self._set_state(BackendState.DRAINING)

    def show_lost(self) -> None:
        """Become CONNECTING, before requests that were there look for another backend."""
        self._set_state(BackendState.CONNECTING)

    async def run(self) -> None:
        """Stay connected until cancelled; waits between attempts double up to the configured limit."""
        wait = self._config.reconnect_min_seconds
        while True:
            begin = time.monotonic()
            try:
                await self._connect()
            except grpc.aio.AioRpcError as error:
                self.show_lost()
                _log.info("backend connection ended", backend=self.key, code=error.code().name)
            except (LinkLost, PenstockError, StartupError, asyncio.InvalidStateError) as error:
                # StartupError: a TLS or token file cannot be read, perhaps because it is being replaced.
                # InvalidStateError: a command was written to a stream that had just ended.
                _log.warning("backend lost", backend=self.key, cause=str(error))
            if time.monotonic() - begin > self._config.reconnect_max_seconds:
                wait = self._config.reconnect_min_seconds
            await asyncio.sleep(wait)
            wait = min(2 * wait, self._config.reconnect_max_seconds)

    def open_channel(self) -> contextlib.AbstractAsyncContextManager[Channel]:
        """Open a channel of its own to the backend, which no loss of the other one ends."""
        timeout = self._config.connect_timeout_seconds
        return self._transport.open_channel(self.key, self._channel_config, connect_timeout_seconds=timeout)

    @contextlib.asynccontextmanager
    async def reach(self) -> AsyncIterator[Channel]:
        """Give a channel for a call of operators: that of requests, while there are any, else one of its own.

        A backend that has no model, or another tokenizer, is dialled and left again and again. Raises StartupError as
        `open_channel`.
        """
        if self._channel is not None and self._is_served:
            yield self._channel
            return
        async with self.open_channel() as channel:
            yield channel

    def require_channel(self) -> Channel:
        """Return the present connection. Raises Unavailable when there is none."""
        if self._channel is None:
            raise Unavailable("the backend is not connected", reason="NO_BACKEND")
        return self._channel

    async def watch_health(self, connection: BackendConnection, on_change: Callable[[], None]) -> None:
        """Follow the health of a connection's process; `on_change` is called at every change."""
        try:
            async with contextlib.aclosing(connection.watch_health()) as updates:
                async for is_healthy in updates:
                    self._is_healthy = is_healthy
                    on_change()
        finally:
            self._is_healthy = False

    async def _connect(self) -> None:
        async with self.open_channel() as channel:
            self._channel = channel
            try:
                await self._check_and_serve(channel)
            finally:
                self._channel = None

    async def _check_and_serve(self, channel: Channel) -> None:
        connection = connect(self._target, channel, self._config, self._tokenizer)
        # A model that is still loading has no limits and no fingerprint yet.
        try:
            if not await connection.until_serving(partial(self._set_starting, True)):
                raise LinkLost("health ended")
        finally:
            self._set_starting(False)
        self._info = await connection.model_info()
        if not self._belongs_here(self._info):
            self._set_state(BackendState.MISMATCH)
            return
        self._is_served = True
        try:
            await self._serve(channel, connection, self._info)
        finally:
            self._is_served = False

    def _set_starting(self, is_starting: bool) -> None:
        """Note that a process is there that does not serve yet, or is not any more."""
        if is_starting is not self._is_starting:
            self._is_starting = is_starting
            # Streams that lost their backend wait longer for one that is on its way.
            self._on_change()

    def _belongs_here(self, info: model_pb2.GetModelInfoResponse) -> bool:
        ours, theirs = self._tokenizer().tokenizer_fingerprint, info.tokenizer_fingerprint
        if theirs and theirs != ours:
            if self._state is not BackendState.MISMATCH:
                _log.error(
                    "backend not used: its model was made for another tokenizer",
                    backend=self.key,
                    tokenizer=ours[:12],
                    model=theirs[:12],
                )
            return False
        if not theirs:
            _log.warning("backend has no tokenizer fingerprint to compare", backend=self.key)
        return True

    def _set_state(self, state: BackendState) -> None:
        if state is not self._state:
            self._state = state
            _log.info("backend state", backend=self.key, state=state.name)
            self._on_change()


def is_broken(error: grpc.aio.AioRpcError, failure: PenstockError) -> bool:
    """True when a call ended since its connection did: a status without a reason is not the backend's."""
    return failure.reason == "UNKNOWN" and error.code() in _BROKEN


def backend_lost() -> Unavailable:
    """Make the error of a call that lost its backend."""
    return Unavailable("the backend was lost", reason="BACKEND_LOST", retry_after_seconds=1.0)


def _named(config: RouterConfig, target: str) -> RouterConfig:
    """Return the name in the certificate: the configured one, also when the connection goes to one of its addresses."""
    service = service_of(target)
    host = service.host if service is not None else split_target(target, "--backend")[0]
    if config.channel_tls_server_name is not None or is_address(host):
        return config
    return dataclasses.replace(config, channel_tls_server_name=host) if config.channel_tls_ca else config
