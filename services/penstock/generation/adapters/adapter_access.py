"""Adapters as operators load and unload them while the process serves, and the count of these changes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

from penstock.common.errors import FailedPrecondition, InvalidArgument, NotFound, PenstockError
from penstock.common.logging import get_logger
from penstock.generation.adapters.figures import AdapterInfo
from penstock.generation.adapters.store import AdapterStore

# As in a hub id: a name is a model's name to clients, and a label of metrics.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_log = get_logger("penstock.generation")


class AdapterAccess:
    """Loads and unloads adapters of one process. Used from its event loop only."""

    def __init__(
        self,
        store: AdapterStore,
        root: Path | None,
        *,
        on_change: Callable[[], None],
        on_failure: Callable[[PenstockError], None],
    ) -> None:
        """`root`: adapters lie below it; None: none may be loaded. `on_change` is called when `version` has changed;
        `on_failure` takes the errors of loads."""
        self._store = store
        self._root = root
        # Spellings of it that paths of adapters may begin with.
        self._roots = () if root is None else (root, root.resolve())
        self._on_change = on_change
        self._on_failure = on_failure
        # A load has one until it ends, its caller gone or not. Some are checked at the same time; the store reads one
        # at a time: they share the disk, and the memory of reading one.
        self._places = asyncio.Semaphore(store.limits.max_adapter_checks)
        # Loads go on to their end even if their caller is gone.
        self._loads: set[asyncio.Task[None]] = set()
        # Number of changes to the known names; those of the start count as one.
        self.version = 1 if store.names() else 0

    async def load(self, name: str, path: str, *, replace: bool) -> float:
        """Load the folder `path` below the root, by default that of the adapter's name. Return the seconds it took.

        Raises FailedPrecondition NO_ADAPTER_ROOT, and InvalidArgument, ResourceExhausted and Unavailable as
        `AdapterStore.load`.
        """
        begin = time.monotonic()
        if self._root is None:
            raise FailedPrecondition(
                "adapters are loaded only from below one folder: start the service with --adapter-root",
                reason="NO_ADAPTER_ROOT",
            )
        if not _NAME.fullmatch(name):
            raise InvalidArgument("name", "must be letters, digits and any of . _ / -, the first a letter or a digit")
        await self._places.acquire()
        task = asyncio.ensure_future(self._load(name, self._root / (path or name), self._root, replace))
        self._loads.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)
        return time.monotonic() - begin

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._loads.discard(task)
        self._places.release()

    async def _load(self, name: str, path: Path, root: Path, replace: bool) -> None:
        try:
            await asyncio.to_thread(self._store.load, name, path, root=root, replace=replace)
        except PenstockError as error:
            self._on_failure(error)
            _log.warning("adapter not loaded", adapter=name, reason=error.reason)
            raise
        _log.info("adapter loaded", adapter=name)
        self._changed()

    def unload(self, name: str) -> int:
        """Forget an adapter; return the number of requests that go on with it. Raises as `AdapterStore.unload`."""
        live = sum(info.num_requests for info in self._store.infos() if info.name == name)
        self._store.unload(name)
        _log.info("adapter unloaded", adapter=name, live_requests=live)
        self._changed()
        return live

    def infos(self) -> tuple[AdapterInfo, ...]:
        """Return facts of every known adapter."""
        return self._store.infos()

    def info(self, name: str) -> AdapterInfo:
        """Return facts of one adapter. Raises NotFound."""
        found = next((info for info in self._store.infos() if info.name == name), None)
        if found is None:
            raise NotFound("name: no adapter of this name is loaded", reason="ADAPTER_NOT_FOUND", field="name")
        return found

    def shown_path(self, info: AdapterInfo) -> str:
        """Return an adapter's path below the root; empty if it lies elsewhere, as one of --lora may."""
        below = (info.path.relative_to(root) for root in self._roots if info.path.is_relative_to(root))
        return str(next(below, ""))

    def _changed(self) -> None:
        self.version += 1
        self._on_change()
