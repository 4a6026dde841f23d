"""Files of a model that comes as bytes: names and sizes are settled first, then each file arrives in order.

The folder belongs to this process alone (mode 0700), and to one load. It is removed when that load ends, whatever the
end; weights leave it as soon as they are in memory. What a killed process left is removed by the next one that uses the
same parent: the folder's owner holds a lock on it, which the system gives up with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from penstock.common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from penstock.common.logging import get_logger
from penstock.common.units import format_size
from penstock.generation.core.load_order import FileSize
from penstock.generation.core.model_config import CONFIG_FILE
from penstock.generation.weights.files import INDEX_FILE, PACKED_FILE, header_bytes

_log = get_logger("penstock.generation")
# A folder has the first name until it is locked.
_NEW_PREFIX, _PREFIX = "penstock-new-model-", "penstock-model-"
WEIGHTS_SUFFIX = ".safetensors"
_TEXTS = (
    CONFIG_FILE,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    INDEX_FILE,
)
_WEIGHTS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors")
_FIELD = "start.upload.files"


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Bounds of the service's configuration; `max_bytes` None: what memory and disk have free."""

    max_bytes: int | None
    max_files: int
    max_text_bytes: int


def check_files(files: Sequence[FileSize], limits: UploadLimits, free_memory: int, free_disk: int) -> None:
    """Refuse files by name and size, before any byte of them.

    Raises InvalidArgument naming the file by its place, ResourceExhausted MODEL_TOO_LARGE naming the flag.
    """
    if not 0 < len(files) <= limits.max_files:
        raise InvalidArgument(_FIELD, f"must be 1 to {limits.max_files} files (--max-model-files)")
    seen: set[str] = set()
    for place, file in enumerate(files):
        where = f"{_FIELD}[{place}]"
        if file.name == PACKED_FILE:
            raise InvalidArgument(f"{where}.name", "packed weights belong to their machine: send the checkpoint")
        is_text = file.name in _TEXTS
        if not is_text and _WEIGHTS.fullmatch(file.name) is None:
            raise InvalidArgument(f"{where}.name", f"must be one of {', '.join(_TEXTS)}, or a plain name *.safetensors")
        if file.name in seen:
            raise InvalidArgument(f"{where}.name", "is there twice")
        seen.add(file.name)
        if not file.num_bytes:
            raise InvalidArgument(f"{where}.size_bytes", "must be above 0")
        if is_text and file.num_bytes > limits.max_text_bytes:
            raise InvalidArgument(
                f"{where}.size_bytes", f"must be at most {limits.max_text_bytes} (--max-model-text-bytes)"
            )
    if CONFIG_FILE not in seen:
        raise InvalidArgument(_FIELD, f"must have {CONFIG_FILE}")
    if not any(name.endswith(WEIGHTS_SUFFIX) for name in seen):
        raise InvalidArgument(_FIELD, "must have weights: *.safetensors")
    _check_total(sum(file.num_bytes for file in files), limits, free_memory, free_disk)


def _check_total(total: int, limits: UploadLimits, free_memory: int, free_disk: int) -> None:
    if limits.max_bytes is not None and total > limits.max_bytes:
        why = f"at most {format_size(limits.max_bytes)} are taken (--max-model-bytes)"
    elif limits.max_bytes is None and total > free_memory:
        why = f"{format_size(free_memory)} of memory is free (--max-model-bytes takes more)"
    elif total > free_disk:
        why = f"{format_size(free_disk)} of the disk is free (--model-upload-folder may be on another one)"
    else:
        return
    raise ResourceExhausted(f"the files are {format_size(total)}, and {why}", reason="MODEL_TOO_LARGE", field=_FIELD)


class UploadFolder:
    """Private folder that the files are written into, in order. Its methods block: call them on a thread, one at a
    time."""

    def __init__(self, parent: Path, files: Sequence[FileSize], limits: UploadLimits) -> None:
        """Make it. `files` are checked. Raises FailedPrecondition naming --model-upload-folder."""
        self._files = files
        self._limits = limits
        self._place = 0
        self._file: IO[bytes] | None = None
        self._written = 0
        self.total_bytes = sum(file.num_bytes for file in files)
        self.received_bytes = 0
        try:
            self.path, self._lock = _locked_folder(parent)
        except OSError as error:
            raise FailedPrecondition(
                f"the folder for files of models cannot be used (--model-upload-folder): {error.strerror}",
                reason="MODEL_FOLDER",
            ) from error

    @property
    def is_whole(self) -> bool:
        """True when every file has all of its bytes."""
        return self._place == len(self._files)

    def write(self, name: str, data: bytes) -> str | None:
        """Append bytes to the present file; return its name when they complete it.

        Raises InvalidArgument for bytes of another file, and for more than was announced; ResourceExhausted when the
        disk is full.
        """
        if self.is_whole:
            raise InvalidArgument("chunk", "comes after the last file's last byte", reason="MODEL_REFUSED")
        file = self._files[self._place]
        if name != file.name:
            raise InvalidArgument(
                "chunk.name", f"must be that of {_FIELD}[{self._place}]: files come in order", reason="MODEL_REFUSED"
            )
        if self._written + len(data) > file.num_bytes:
            raise InvalidArgument(
                "chunk.data", f"is more than {_FIELD}[{self._place}].size_bytes", reason="MODEL_REFUSED"
            )
        try:
            if self._file is None:
                self._file = self._opened(file.name)
            self._file.write(data)
            self._written += len(data)
            self.received_bytes += len(data)
            if self._written < file.num_bytes:
                return None
            self._end_file()
        except OSError as error:
            raise ResourceExhausted(
                f"a file cannot be written (--model-upload-folder): {error.strerror}", reason="MODEL_TOO_LARGE"
            ) from error
        if name.endswith(WEIGHTS_SUFFIX):
            self._check_header(name)
        return name

    def require_whole(self) -> None:
        """Raise InvalidArgument naming the file that ended before its last byte."""
        if not self.is_whole:
            raise InvalidArgument(
                f"{_FIELD}[{self._place}]",
                "was cut short: the stream ended before all of its bytes had come",
                reason="MODEL_REFUSED",
            )

    def drop_weights(self) -> None:
        """Remove the weights' files: a mapping of one keeps its pages."""
        for file in self._files:
            if file.name.endswith(WEIGHTS_SUFFIX):
                (self.path / file.name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder. Calling it again is harmless."""
        if self._file is not None:
            # What it has buffered may find the disk full.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _opened(self, name: str) -> IO[bytes]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(self.path / name, flags, 0o600), "wb")

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self._written = 0
        self._place += 1

    def _check_header(self, name: str) -> None:
        """Refuse a header that is longer than its file, or than a parser should be given."""
        place = self._place - 1
        with (self.path / name).open("rb") as file:
            start = file.read(8)
        try:
            size = header_bytes(start)
        except ValueError:
            size = -1
        if not 0 <= size <= self._files[place].num_bytes - 8:
            raise InvalidArgument(
                f"{_FIELD}[{place}]", "has a header that is longer than the file", reason="MODEL_REFUSED"
            )
        if size > self._limits.max_text_bytes:
            raise InvalidArgument(
                f"{_FIELD}[{place}]",
                f"has a header of more than {self._limits.max_text_bytes} bytes (--max-model-text-bytes)",
                reason="MODEL_REFUSED",
            )


def free_disk(parent: Path) -> int:
    """Return the bytes that the folder's disk has free; 0 where the folder cannot be used."""
    try:
        return shutil.disk_usage(parent).free
    except OSError:
        return 0


def upload_parent(configured: str | None) -> Path:
    """Return the folder in which upload folders are made."""
    return Path(configured).expanduser() if configured else Path(tempfile.gettempdir())


def remove_leftovers(parent: Path) -> None:
    """Remove upload folders of processes that were killed. Never raises; folders that are in use stay."""
    try:
        entries = [entry for entry in os.scandir(parent) if entry.name.startswith(_PREFIX)]
    except OSError:
        return
    for entry in entries:
        with contextlib.suppress(OSError):
            # Nobody else's folder, and no link to one.
            if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            lock = _lock_of(Path(entry.path))
            try:
                shutil.rmtree(entry.path)
                _log.warning("files of a model that a killed process left were removed", folder=entry.path)
            finally:
                os.close(lock)


def _locked_folder(parent: Path) -> tuple[Path, int]:
    """Make a folder that `remove_leftovers` of other processes leaves alone; return it with its lock."""
    new = Path(tempfile.mkdtemp(prefix=_NEW_PREFIX, dir=parent))
    lock = _lock_of(new)
    path = new.with_name(_PREFIX + new.name.removeprefix(_NEW_PREFIX))
    new.rename(path)
    return path, lock


def _lock_of(folder: Path) -> int:
    """Lock a folder. Raises BlockingIOError while another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
