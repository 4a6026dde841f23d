"""Adapters as operators load and unload them while the process serves, and the count of these changes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock.common.errors import FailedPrecondition, InvalidArgument, NotFound, PenstockError
from penstock.common.logging import get_logger
from penstock.generation.adapters.adapter_source import AllowedStores, Source, is_source
from penstock.generation.adapters.figures import AdapterInfo
from penstock.generation.adapters.remote_adapters import RemoteAdapters
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
        remote: RemoteAdapters | None = None,
    ) -> None:
        """`root`: adapters lie below it; None: none may be loaded. `on_change` is called when `version` has changed;
        `on_failure` takes the errors of loads. `remote`: those of stores; None: there are none."""
        self._store = store
        self._root = root
        # Spellings of it that paths of adapters may begin with.
        self._roots = () if root is None else (root, root.resolve())
        self._on_change = on_change
        self._on_failure = on_failure
        self._remote = remote
        # A load has one until it ends, its caller gone or not. Some are checked at the same time; the store reads one
        # at a time: they share the disk, and the memory of reading one.
        self._places = asyncio.Semaphore(store.limits.max_adapter_checks)
        # Loads go on to their end even if their caller is gone.
        self._loads: set[asyncio.Task[None]] = set()
        # Number of changes to the known names; those of the start count as one.
        self.version = 1 if store.names() else 0

    async def load(self, name: str, path: str, *, replace: bool) -> float:
        """Load the folder `path` below the root, by default that of the adapter's name, or an adapter of a store.

        Without a path and such a folder, a name may be a hub id. Return the seconds it took. Raises FailedPrecondition
        NO_ADAPTER_ROOT, and InvalidArgument, ResourceExhausted and Unavailable as `AdapterStore.load` and
        `RemoteAdapters.bring`.
        """
        begin = time.monotonic()
        if self._root is None:
            raise FailedPrecondition(
                "adapters are loaded only from below one folder: start the service with --adapter-root",
                reason="NO_ADAPTER_ROOT",
            )
        # A place in a store may be the adapter's name, too.
        if not _NAME.fullmatch(name) and not (is_source(name) and path in ("", name)):
            raise InvalidArgument("name", "must be letters, digits and any of . _ / -, the first a letter or a digit")
        source = self._source(name, path, self._root)
        await self._places.acquire()
        task = asyncio.ensure_future(self._load(name, source or self._root / (path or name), self._root, replace))
        self._loads.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)
        return time.monotonic() - begin

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._loads.discard(task)
        self._places.release()

    def _source(self, name: str, path: str, root: Path) -> Source | None:
        """Return the place in a store that a load means; None: a folder. Raises InvalidArgument ADAPTER_PATH."""
        if is_source(path or name):
            return (self._remote.stores if self._remote is not None else AllowedStores(())).source(path or name)
        if path or self._remote is None or (root / name).is_dir():
            return None
        return self._remote.stores.hub_source(name)

    async def _load(self, name: str, place: Path | Source, root: Path, replace: bool) -> None:
        try:
            if isinstance(place, Path):
                await asyncio.to_thread(self._store.load, name, place, root=root, replace=replace)
                if self._remote is not None:
                    self._remote.settle()
            else:
                assert self._remote is not None
                loop = asyncio.get_running_loop()
                changed = partial(loop.call_soon_threadsafe, self._changed)
                await asyncio.to_thread(self._remote.load, name, place, root, replace=replace, on_given_up=changed)
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
        if self._remote is not None:
            self._remote.settle()
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
        """Return an adapter's path below the root, or its place in a store, by which another service finds it, too.

        Empty if it lies elsewhere, as one of --lora may.
        """
        if self._remote is not None and (source := self._remote.source_of(info.name, info.path)) is not None:
            return str(source)
        below = (info.path.relative_to(root) for root in self._roots if info.path.is_relative_to(root))
        return str(next(below, ""))

    def close(self) -> None:
        """Let the files of stores go; the adapters in memory stay."""
        if self._remote is not None:
            self._remote.close()

    def _changed(self) -> None:
        self.version += 1
        self._on_change()
