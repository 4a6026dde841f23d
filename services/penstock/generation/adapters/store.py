"""Store of LoRA adapters: names, the adapters in memory, and the requests that use them."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from penstock.common.errors import InvalidArgument, NotFound, ResourceExhausted
from penstock.common.units import format_size
from penstock.generation.adapters.adapter_limits import AdapterLimits
from penstock.generation.adapters.figures import AdapterFigures, AdapterInfo
from penstock.generation.core.adapter import Adapter

# Until some request may have ended.
_RETRY_SECONDS = 1.0


class AdapterFiles(Protocol):
    """The files of an adapter, checked (peft_folder.PeftFolder)."""

    rank: int
    targets: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of its matrices in memory."""

    @property
    def depends_on_weights(self) -> bool:
        """True when what `read` returns fits only the weights that the model has then."""

    def digest(self) -> str:
        """Read the files and return their SHA-256. Raises InvalidArgument."""

    def read(self) -> AdapterMatrices:
        """Read the matrices. Raises InvalidArgument, ResourceExhausted and Unavailable as AdapterStore.load."""


class AdapterMatrices(Protocol):
    """An adapter's matrices in the model's format."""

    num_bytes: int


# (folder, root) -> its files, checked. Raises as AdapterStore.load.
OpenAdapter = Callable[[Path, Path | None], AdapterFiles]


@dataclass(slots=True)
class _Known:
    """A known name: its path, and its last reading."""

    path: Path
    root: Path | None
    # Without weights once it left memory.
    last: Adapter
    is_loaded: bool = True
    # Orders the adapters by their last use.
    used_at: int = field(default=0)


class AdapterStore:
    """Store of adapters. Thread-safe. `load` and `bring` read files: call them off the event loop.

    A known adapter is in memory, or was evicted for another one while no request used it, least recently used first;
    then `bring` reads it again from its path, as a new generation. Requests hold the Adapter that they began with:
    unloading or replacing a name never affects them, and the memory is freed with the last of them.
    """

    def __init__(self, limits: AdapterLimits, open_adapter: OpenAdapter, *, reserved: str = "") -> None:
        """`open_adapter` checks a folder. `reserved`: a name that no adapter may have, the model's."""
        self.limits = limits
        self._open = open_adapter
        self._reserved = reserved
        self._known: dict[str, _Known] = {}
        # Requests of every adapter that has some.
        self._users: dict[Adapter, int] = {}
        self._uses = 0
        self._loads = 0
        self._evictions = 0
        # Held for moments.
        self._lock = threading.Lock()
        # Held while files are read: one adapter comes at a time.
        self._reading = threading.Lock()

    def open_by(self, open_adapter: OpenAdapter) -> None:
        """Check and read folders by another function from now on: the model is another object of the same shape.

        Adapters that depend on its weights are read again at their next use; no request may use one now. Blocking: it
        waits for a reading in progress.
        """
        with self._reading, self._lock:
            self._open = open_adapter
            for known in self._known.values():
                if known.last.depends_on_weights:
                    known.last, known.is_loaded = _without_weights(known.last), False

    def load(self, name: str, path: Path, *, root: Path | None = None, replace: bool = False) -> Adapter:
        """Read the PEFT folder `path` and make it known as `name`.

        `root`: folder and files must lie below it, links followed; None: anywhere. `replace`: a known name gets the new
        adapter; requests accepted from now on use it, earlier ones keep theirs. When this raises, names and their
        adapters are unchanged. Blocking.

        Raises InvalidArgument with field `name` (empty, too long, the model's; known and not `replace`: ADAPTER_EXISTS)
        or `path`: ADAPTER_PATH (no such folder, a file is missing, or outside `root`), ADAPTER_RANK (a rank above
        --max-adapter-rank), ADAPTER_UNSUPPORTED (DoRA, other PEFT methods, a target module or modules_to_save that
        cannot be served), ADAPTER_BROKEN (wrong shapes or names, not finite, no JSON). Raises ResourceExhausted:
        ADAPTER_SLOTS_FULL (requests use all --max-adapters, or --max-known-adapters are known), ADAPTER_MEMORY_FULL
        (--adapter-memory; or another process of the model has none). Raises Unavailable: ENGINE_FAILED (such a process
        has ended), ENGINE_STOPPED (the model is being closed).
        """
        self.check(name, replace=replace)
        # Before its turn: a folder may take long to check, and others go on meanwhile.
        opened_by = self._open
        files = opened_by(path, root)
        with self._reading:
            self._check_place(name, replace=replace)
            if self._open is not opened_by:
                files = self._open(path, root)
            return self._read(name, path, root, files, is_new=True)

    def check(self, name: str, *, replace: bool) -> None:
        """Raise as `load` when no adapter may come as `name`."""
        self._check_name(name)
        self._check_place(name, replace=replace)

    def unload(self, name: str) -> None:
        """Forget `name` now. Requests that have it go on to their end; its memory goes with the last of them.

        Raises NotFound (ADAPTER_NOT_FOUND, field `name`).
        """
        with self._lock:
            if self._known.pop(name, None) is None:
                raise _unknown("name")

    def names(self) -> tuple[str, ...]:
        """Return the known names in the order in which they were first loaded."""
        with self._lock:
            return tuple(self._known)

    def __contains__(self, name: object) -> bool:
        """True when `name` is known."""
        return name in self._known

    def infos(self) -> tuple[AdapterInfo, ...]:
        """Return facts of every known adapter, in the order of `names`."""
        with self._lock:
            return tuple(
                AdapterInfo(
                    name,
                    known.path,
                    known.last.rank,
                    known.last.targets,
                    known.last.num_bytes,
                    known.is_loaded,
                    self._users.get(known.last, 0),
                    known.last.generation,
                    known.used_at,
                )
                for name, known in self._known.items()
            )

    def get(self, name: str) -> Adapter | None:
        """Return the adapter in memory, and count this as a use; None: `bring` must read it first.

        Raises NotFound (ADAPTER_NOT_FOUND, field `adapter`).
        """
        with self._lock:
            known = self._known.get(name)
            if known is None:
                raise _unknown("adapter")
            self._uses += 1
            known.used_at = self._uses
            return known.last if known.is_loaded else None

    def bring(self, name: str) -> Adapter:
        """Return the adapter, read again where it is not in memory. Blocking. Raises as `get` and `load`."""
        with self._reading:
            adapter = self.get(name)
            if adapter is not None:
                return adapter
            with self._lock:
                known = self._known.get(name)
            if known is None:
                raise _unknown("adapter")
            return self._read(name, known.path, known.root, self._open(known.path, known.root), is_new=False)

    @contextmanager
    def in_use(self, adapter: Adapter | None) -> Iterator[None]:
        """Count a use of `adapter` inside the block; None: there is none."""
        if adapter is None:
            yield
            return
        self.acquire(adapter)
        try:
            yield
        finally:
            self.release(adapter)

    def acquire(self, adapter: Adapter) -> None:
        """Count one more request that uses `adapter`, known by now or not."""
        with self._lock:
            self._users[adapter] = self._users.get(adapter, 0) + 1

    def release(self, adapter: Adapter) -> None:
        """Count one request less."""
        with self._lock:
            left = self._users[adapter] - 1
            if left:
                self._users[adapter] = left
            else:
                del self._users[adapter]

    @property
    def depend_on_weights(self) -> bool:
        """True while an adapter in memory was made for the model's present weights."""
        with self._lock:
            return any(adapter.depends_on_weights for adapter in self._present())

    def figures(self) -> AdapterFigures:
        """Return figures for metrics."""
        with self._lock:
            present = self._present()
            num_bytes = sum(adapter.num_bytes for adapter in present)
            return AdapterFigures(len(self._known), len(present), num_bytes, self._loads, self._evictions)

    def _check_name(self, name: str) -> None:
        most = self.limits.max_name_chars
        if not 0 < len(name) <= most or not name.isprintable():
            raise InvalidArgument("name", f"must have 1 to {most} printable characters")
        if name == self._reserved:
            raise InvalidArgument("name", "is the model's own")

    def _check_place(self, name: str, *, replace: bool) -> None:
        """Raise when no adapter may come as `name`."""
        with self._lock:
            if name in self._known and not replace:
                raise InvalidArgument("name", "an adapter of this name is loaded", reason="ADAPTER_EXISTS")
            if name not in self._known and len(self._known) >= self.limits.max_known_adapters:
                raise ResourceExhausted(
                    f"name: --max-known-adapters {self.limits.max_known_adapters} are known: unload one",
                    reason="ADAPTER_SLOTS_FULL",
                    field="name",
                )

    def _read(self, name: str, path: Path, root: Path | None, files: AdapterFiles, *, is_new: bool) -> Adapter:
        """Read an adapter while `_reading` is held. A name that was unloaded meanwhile stays so, unless it `is_new`."""
        with self._lock:
            self._make_room(files.num_bytes)
        weights = files.read()
        generation, digest = secrets.token_hex(16), files.digest()
        adapter = Adapter(
            name, path, generation, files.rank, files.targets, weights.num_bytes, weights, digest,
            depends_on_weights=files.depends_on_weights,
        )  # fmt: skip
        with self._lock:
            self._loads += 1
            known = self._known.get(name)
            if known is None and not is_new:
                raise _unknown("adapter")
            self._uses += 1
            if known is None:
                self._known[name] = _Known(path, root, adapter, used_at=self._uses)
            else:
                known.path, known.root, known.last = path, root, adapter
                known.is_loaded, known.used_at = True, self._uses
        return adapter

    def _present(self) -> set[Adapter]:
        """Return the adapters in memory, unloaded ones that requests use included."""
        return {known.last for known in self._known.values() if known.is_loaded} | self._users.keys()

    def _make_room(self, num_bytes: int) -> None:
        """Let idle adapters leave until another one of `num_bytes` may come. Raises ResourceExhausted."""
        limits = self.limits
        if num_bytes > limits.max_bytes:
            raise ResourceExhausted(
                f"path: the adapter takes {format_size(num_bytes)}: raise --adapter-memory",
                reason="ADAPTER_MEMORY_FULL",
                field="path",
            )
        present = self._present()
        idle = [known for known in self._known.values() if known.is_loaded and known.last not in self._users]
        idle.sort(key=lambda known: known.used_at)
        taken = sum(adapter.num_bytes for adapter in present)
        leaving: list[_Known] = []
        while len(present) - len(leaving) >= limits.max_adapters or taken + num_bytes > limits.max_bytes:
            if len(leaving) == len(idle):
                self._raise_full(is_slot=len(present) - len(leaving) >= limits.max_adapters)
            leaving.append(idle[len(leaving)])
            taken -= leaving[-1].last.num_bytes
        for known in leaving:
            known.last = _without_weights(known.last)
            known.is_loaded = False
            self._evictions += 1

    def _raise_full(self, *, is_slot: bool) -> None:
        if is_slot:
            raise ResourceExhausted(
                f"requests use all adapters that may be in memory: --max-adapters {self.limits.max_adapters}",
                reason="ADAPTER_SLOTS_FULL",
                retry_after_seconds=_RETRY_SECONDS,
            )
        raise ResourceExhausted(
            "requests use the adapters that are in memory: --adapter-memory has no room for another one",
            reason="ADAPTER_MEMORY_FULL",
            retry_after_seconds=_RETRY_SECONDS,
        )


def _without_weights(adapter: Adapter) -> Adapter:
    return replace(adapter, weights=None)


def _unknown(field: str) -> NotFound:
    return NotFound(f"{field}: no adapter of this name is loaded", reason="ADAPTER_NOT_FOUND", field=field)
