"""Adapters of one backend: what it told of them, asked for again at every change, and loads there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from penstock.common.errors import from_rpc_error
from penstock.common.logging import get_logger
from penstock.router.aio import Wakeup
from penstock.router.backends.adapter_list import AdapterList
from penstock.router.backends.link import Link, backend_lost, is_broken
from penstock.router.config import RouterConfig
from penstock.serving.transport import Channel
from penstock.v1 import admin_pb2, admin_pb2_grpc

_log = get_logger("penstock.router")


class BackendAdapters:
    """Adapters of one backend. Belongs to one event loop."""

    def __init__(self, link: Link, config: RouterConfig, on_change: Callable[[], None]) -> None:
        """Make it. `on_change`: others are known than before."""
        # As the process told last, also after it was lost: its adapters are then known, and nowhere ready.
        self.known = AdapterList()
        self._link = link
        self._config = config
        self._on_change = on_change
        self._reported_version = 0
        self._changed = Wakeup()

    @property
    def are_known(self) -> bool:
        """True once this process has told which it has. Before that requests are not placed, if it has any."""
        return self.known.is_known or not self._reported_version

    def connect(self) -> None:
        """Begin anew: the process may be another one."""
        self._reported_version = 0
        self.known.connect()

    def take_version(self, version: int) -> None:
        """Take the version of a report."""
        self._reported_version = version
        if self.known.note_version(version):
            self._changed.set()

    async def load(self, name: str, path: str, timeout: float) -> None:
        """Make it load an adapter; one that it has by now is no error. `path`: below its own root; empty: the name.

        Raises the backend's error; Unavailable when it is not connected, or was lost meanwhile.
        """
        stub = admin_pb2_grpc.GenerationAdminServiceStub(self._link.require_channel().for_stubs)
        request = admin_pb2.LoadAdapterRequest(name=name, path=path)
        try:
            answer: admin_pb2.LoadAdapterResponse = await stub.LoadAdapter(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            if is_broken(error, failure):
                raise backend_lost() from error
            if failure.reason != "ADAPTER_EXISTS":
                raise failure from error
            # Another router was faster.
            answer = admin_pb2.LoadAdapterResponse(adapter=admin_pb2.Adapter(name=name, path=path))
        self.note_loaded(answer)

    def note_loaded(self, loaded: admin_pb2.LoadAdapterResponse) -> None:
        """Note an adapter that it has loaded: its next report would tell so a moment later."""
        self.known.add(loaded.adapter, loaded.version)
        self._on_change()

    def note_missing(self, name: str, version: int = 0) -> None:
        """Note that it does not know an adapter, any more or yet."""
        self.known.remove(name, version)
        if not version:
            self._changed.set()
        self._on_change()

    async def watch(self, channel: Channel, on_told: Callable[[], None]) -> None:
        """Ask for the adapters whenever a report says that they changed. `on_told`: they are known now."""
        stub = admin_pb2_grpc.GenerationAdminServiceStub(channel.for_stubs)
        while True:
            await self._changed.wait()
            while self.known.note_version(self._reported_version):
                try:
                    found: admin_pb2.ListAdaptersResponse = await stub.ListAdapters(
                        admin_pb2.ListAdaptersRequest(), timeout=self._config.connect_timeout_seconds
                    )
                except grpc.aio.AioRpcError as error:
                    # Requests go on, by what was known.
                    _log.warning("backend does not tell its adapters", backend=self._link.key, code=error.code().name)
                    self.known.give_up()
                    on_told()
                    await asyncio.sleep(self._config.reconnect_max_seconds)
                else:
                    self.known.take(found)
                    on_told()
                    self._on_change()
