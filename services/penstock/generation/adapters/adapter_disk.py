"""Adapters of stores on disk: below --adapter-root by the digest of their files, within a bound of bytes.

Services that share the root share the files. A folder that a service knows an adapter in is locked by it (flock), and
the lock ends with the process, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from penstock.common.errors import InvalidArgument, ResourceExhausted, Unavailable
from penstock.common.logging import get_logger
from penstock.common.units import format_size
from penstock.generation.adapters.adapter_files import BOTH_FILES, CONFIG_FILE, MOST_CONFIG_BYTES
from penstock.generation.adapters.adapter_source import Source
from penstock.generation.adapters.adapter_stores import RemoteAdapter, remote_adapter
from penstock.generation.adapters.store_http import StoredFile

FOLDER = ".from-stores"
_LOCK, _INDEX, _PART = ".lock", "sources.json", "part-"
# Most sources that the index remembers.
_MOST_SOURCES = 4096
# Seconds between two looks at a lock.
_POLL_SECONDS = 0.05
_log = get_logger("penstock.generation")


class AdapterDisk:
    """Adapters of stores below one root, as one service uses them. Thread-safe; all methods block."""

    def __init__(self, root: Path, *, max_bytes: int, seconds: float, environment: Mapping[str, str]) -> None:
        """`seconds`: the longest that one adapter may take to come. `environment` has the credentials of stores."""
        self._folder = root / FOLDER
        self._max_bytes, self._seconds, self._environment = max_bytes, seconds, environment
        # Digest -> descriptor of the lock that this service has on it, and the adapters that it has it for.
        self._held: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def bring(self, source: Source, give_up: Callable[[], bool]) -> Path:
        """Return the folder of an adapter with its present files, which stays until `release`.

        `give_up` releases an adapter that no request uses, the least recently used one; False: there is none. A store
        that does not answer leaves what came from it before.

        Raises InvalidArgument ADAPTER_PATH or ADAPTER_BROKEN, FailedPrecondition ADAPTER_STORE_DENIED, Unavailable
        ADAPTER_STORE_DOWN, and ResourceExhausted ADAPTER_DISK_FULL.
        """
        try:
            return self._bring(source, give_up, time.monotonic() + self._seconds)
        except OSError as error:
            raise ResourceExhausted(
                "path: the adapter could not be written below --adapter-root", reason="ADAPTER_DISK_FULL", field="path"
            ) from error

    def _bring(self, source: Source, give_up: Callable[[], bool], until: float) -> Path:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._turn(until):
            index = self._index()
            kept = index.get(str(source), {})
            remote = remote_adapter(source, self._environment)
            try:
                version = remote.version()
            except Unavailable:
                if not self._is_there(kept.get("digest", "")):
                    raise
                _log.warning("an adapter's store does not answer: its earlier files are used")
                version = kept["version"]
            if version == kept.get("version") and self._is_there(kept["digest"]):
                digest = kept["digest"]
            else:
                digest = self._copied(remote, version, until, give_up)
            self._hold(digest)
            os.utime(self._folder / digest)
            index.pop(str(source), None)
            self._write_index({**index, str(source): {"version": version, "digest": digest}})
        return self._folder / digest

    def release(self, path: Path) -> None:
        """Undo one `bring`: the folder may leave the disk once all are undone, when another adapter needs its room."""
        with self._lock:
            descriptor, count = self._held.pop(path.name, (-1, 0))
            if count > 1:
                self._held[path.name] = descriptor, count - 1
            elif count:
                os.close(descriptor)

    def close(self) -> None:
        """Release all."""
        with self._lock:
            for descriptor, _ in self._held.values():
                os.close(descriptor)
            self._held.clear()

    @contextlib.contextmanager
    def _turn(self, until: float) -> Iterator[None]:
        """Hold the root for one adapter that comes, among threads and processes. Raises Unavailable."""
        with (self._folder / _LOCK).open("wb") as file:
            while not _taken(file.fileno(), fcntl.LOCK_EX):
                if time.monotonic() > until:
                    raise Unavailable(
                        "path: other adapters come from stores at this moment",
                        reason="ADAPTER_STORE_DOWN",
                        retry_after_seconds=1.0,
                    )
                time.sleep(_POLL_SECONDS)
            # Of processes that were killed.
            for left in self._folder.glob(f"{_PART}*"):
                shutil.rmtree(left, ignore_errors=True)
            yield

    def _copied(self, remote: RemoteAdapter, version: str, until: float, give_up: Callable[[], bool]) -> str:
        """Copy both files, and return their digest."""
        part = Path(tempfile.mkdtemp(prefix=_PART, dir=self._folder))
        try:
            digest = hashlib.sha256()
            for name in BOTH_FILES:

                def begin(file: StoredFile, name: str = name) -> None:
                    if name == CONFIG_FILE and file.num_bytes > MOST_CONFIG_BYTES:
                        raise InvalidArgument(
                            "path", f"{name} is longer than {MOST_CONFIG_BYTES} bytes", reason="ADAPTER_BROKEN"
                        )
                    self._make_room(file.num_bytes + _size(part), give_up)

                remote.copy(name, version, part / name, until, begin)
                with (part / name).open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            found = digest.hexdigest()
            if self._is_there(found):
                return found
            # What is left of one that was removed in part.
            shutil.rmtree(self._folder / found, ignore_errors=True)
            part.rename(self._folder / found)
            return found
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _make_room(self, num_bytes: int, give_up: Callable[[], bool]) -> None:
        """Remove the least recently used adapters until another one of `num_bytes` may come."""
        if num_bytes > self._max_bytes:
            raise ResourceExhausted(
                f"path: the adapter takes {format_size(num_bytes)}: raise --adapter-disk",
                reason="ADAPTER_DISK_FULL",
                field="path",
            )
        while sum(_size(folder) for folder in self._folders()) + num_bytes > self._max_bytes:
            if not self._remove_oldest() and not give_up():
                raise ResourceExhausted(
                    "path: requests use the adapters of stores on disk: --adapter-disk has no room for another",
                    reason="ADAPTER_DISK_FULL",
                    field="path",
                    retry_after_seconds=1.0,
                )

    def _remove_oldest(self) -> bool:
        """Remove the least recently used adapter that no service knows; False: there is none."""
        for folder in sorted(self._folders(), key=lambda one: one.stat().st_mtime):
            with contextlib.suppress(OSError):
                descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    if _taken(descriptor, fcntl.LOCK_EX):
                        shutil.rmtree(folder)
                        return True
                finally:
                    os.close(descriptor)
        return False

    def _hold(self, digest: str) -> None:
        with self._lock:
            descriptor, count = self._held.get(digest, (-1, 0))
            if not count:
                descriptor = os.open(self._folder / digest / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
                # Nobody removes it now: whoever would has no turn.
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            self._held[digest] = descriptor, count + 1

    def _folders(self) -> list[Path]:
        return [one for one in self._folder.iterdir() if one.is_dir() and not one.name.startswith(_PART)]

    def _is_there(self, digest: str) -> bool:
        folder = self._folder / digest
        return bool(digest) and all((folder / name).is_file() for name in BOTH_FILES)

    def _index(self) -> dict[str, dict[str, str]]:
        """Return source -> version and digest, the last used at the end."""
        try:
            read = json.loads((self._folder / _INDEX).read_text())
            return {
                source: {"version": str(one["version"]), "digest": str(one["digest"])}
                for source, one in read.items()
                if self._is_there(str(one["digest"]))
            }
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            # It saves downloads; no more.
            return {}

    def _write_index(self, index: Mapping[str, Mapping[str, str]]) -> None:
        part = self._folder / f"{_PART}index"
        part.write_text(json.dumps(dict(list(index.items())[-_MOST_SOURCES:])))
        part.replace(self._folder / _INDEX)


def _taken(descriptor: int, kind: int) -> bool:
    """Take a lock; False when another has it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
