"""Large tokenizers as transformers read them, in files of this user's cache: a second start does not read them again.

transformers takes four seconds of a core for the 262,144 entries of Gemma 3. A file is found by all that its content
was made from: the folder's name, its files, and the releases that read them. It is no code, and one that is cut short
or renamed, or that another user may write, is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from penstock import __version__
from penstock.common.environment import cache_folder
from penstock.common.kept_files import keep_last_used
from penstock.tokenizer.bundle import TokenizerBundle

# Changes with what a bundle is, and with how it is made of a folder.
_FORM = "1"
_READERS = ("transformers", "tokenizers")
# Characters of a tokenizer's JSON from which a file is worth its place. What is smaller is read in a moment.
SMALLEST = 4 << 20
# For weights, and for larger files, their sizes and times stand.
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".h5", ".onnx")
_LARGEST_HASHED = 64 << 20
_TEMPLATES = "additional_chat_templates"
_SUFFIX = ".tokenizer"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_DAY_SECONDS = 86400.0


def usual_cache(most: int) -> BundleCache:
    """Make the cache in this user's folder for files that can be rebuilt."""
    return BundleCache(Path(cache_folder()) / "tokenizers", most)


class BundleCache:
    """Cache of bundles. Nothing about it is an error: a start without it only takes longer."""

    def __init__(self, root: Path, most: int) -> None:
        """`most`: files that are kept, those that were used last; 0: the cache is neither read nor written."""
        self._root = root
        self._most = most

    def key(self, folder: Path) -> str | None:
        """Return the name for what a folder has now; None where nothing is kept, or the folder cannot be read."""
        if not self._most:
            return None
        digest = hashlib.sha256()
        try:
            for part in (_FORM, __version__, *map(metadata.version, _READERS), str(folder.absolute())):
                digest.update(part.encode("utf-8", "surrogateescape") + b"\0")
            for path in _files(folder):
                digest.update(f"{path.relative_to(folder)}\0".encode("utf-8", "surrogateescape"))
                digest.update(_mark(path))
        except (OSError, metadata.PackageNotFoundError):
            return None
        return digest.hexdigest()

    def read(self, key: str) -> TokenizerBundle | None:
        """Return the bundle of this name; None without one."""
        path = self._root / f"{key}{_SUFFIX}"
        try:
            data = _read_own(path)
            if data is None:
                return None
            written, _, content = data.partition(b"\n")
            if written != _digest(key, content):
                return None
            facts, _, backend = content.partition(b"\n")
            bundle = TokenizerBundle(backend=backend.decode("utf-8", "surrogatepass"), **json.loads(facts))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return bundle

    def write(self, key: str, bundle: TokenizerBundle) -> None:
        """Keep a large bundle by this name, and remove files beyond the most, and what killed writers have left."""
        if len(bundle.backend) < SMALLEST:
            return
        facts = asdict(bundle)
        backend = facts.pop("backend").encode("utf-8", "surrogatepass")
        content = json.dumps(facts).encode() + b"\n" + backend
        with contextlib.suppress(OSError):
            self._root.mkdir(parents=True, exist_ok=True)
            # With rights for this user alone.
            descriptor, name = tempfile.mkstemp(dir=self._root, prefix="tmp")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(_digest(key, content) + b"\n" + content)
                Path(name).replace(self._root / f"{key}{_SUFFIX}")
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
            self._remove()

    def _remove(self) -> None:
        keep_last_used(self._root, f"*{_SUFFIX}", self._most)
        for path in self._root.glob("tmp*"):
            if time.time() - path.stat().st_mtime > _DAY_SECONDS:
                path.unlink(missing_ok=True)


def _read_own(path: Path) -> bytes | None:
    """Read a file, no link, that nobody but this user and root may write; None for another. Raises OSError."""
    # What is looked at is what is read, and a pipe of this name is not waited for.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        is_own = stat.S_ISREG(found.st_mode) and found.st_uid in (0, os.geteuid())
        return file.read() if is_own and not found.st_mode & _OTHERS_WRITE else None


def _digest(key: str, content: bytes) -> bytes:
    """Digest that a file begins with: of its name, too, since one that was renamed is of another folder."""
    return hashlib.sha256(key.encode() + b"\0" + content).hexdigest().encode()


def _files(folder: Path) -> Iterator[Path]:
    """Make the files that a tokenizer may be read from, in order: links count as what they are to."""
    for place in (folder, folder / _TEMPLATES):
        if place.is_dir():
            yield from sorted(path for path in place.iterdir() if path.is_file())


def _mark(path: Path) -> bytes:
    """Digest of a file's content, or its size and time."""
    found = path.stat()
    if path.suffix in _WEIGHTS or found.st_size > _LARGEST_HASHED:
        return f"{found.st_size} {found.st_mtime_ns}\0".encode()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
