"""Large tokenizers as transformers read them, in files of this user's cache: a second start does not read them again.

transformers takes four seconds of a core for the 262,144 entries of Gemma 3. A file is found by all that its content
was made from: the folder's name, its files, and the releases that read them (common/own_files.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from penstock import __version__
from penstock.common.environment import cache_folder
from penstock.common.own_files import OwnFiles
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


def usual_cache(most: int) -> BundleCache:
    """Make the cache in this user's folder for files that can be rebuilt."""
    return BundleCache(Path(cache_folder()) / "tokenizers", most)


class BundleCache:
    """Cache of bundles. Nothing about it is an error: a start without it only takes longer."""

    def __init__(self, root: Path, most: int) -> None:
        """`most`: files that are kept, those that were used last; 0: the cache is neither read nor written."""
        self._kept = OwnFiles(root, ".tokenizer", most)
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
        content = self._kept.read(key)
        if content is None:
            return None
        facts, _, backend = content.partition(b"\n")
        try:
            return TokenizerBundle(backend=backend.decode("utf-8", "surrogatepass"), **json.loads(facts))
        except (ValueError, TypeError, RecursionError):
            return None

    def write(self, key: str, bundle: TokenizerBundle) -> None:
        """Keep a large bundle by this name, and remove files beyond the most."""
        if len(bundle.backend) < SMALLEST:
            return
        facts = asdict(bundle)
        backend = facts.pop("backend").encode("utf-8", "surrogatepass")
        self._kept.write(key, json.dumps(facts).encode() + b"\n" + backend)


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
