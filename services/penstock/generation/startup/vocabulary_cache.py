"""Tables of a large tokenizer's tokens in files of this user's cache: a second start does not read tokenizer.json.

The 262,144 entries of Gemma 3 take half a second of a core, and many objects for a moment. A file is found by all that
its tables were made from.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from penstock import __version__
from penstock.common.environment import cache_folder
from penstock.common.own_files import OwnFiles
from penstock.text.token_bytes import TokenBytes, TokenPrefixes

# Changes with what the tables are, and with how they are made.
_FORM = "1"
# Bytes of a tokenizer.json from which a file is worth its place. What is smaller is read in a moment.
SMALLEST = 1 << 20
_SOURCES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(slots=True)
class TokenTables:
    """The bytes of a tokenizer's tokens, and their order, which is made when it is first asked for."""

    token_bytes: TokenBytes
    _prefixes: TokenPrefixes | None = None
    _keep: Callable[[TokenBytes, TokenPrefixes], None] | None = field(default=None, repr=False)

    def prefixes(self) -> TokenPrefixes:
        """Return the tokens by their bytes. The first call may take a fraction of a second, and write a file."""
        if self._prefixes is None:
            self._prefixes = TokenPrefixes(self.token_bytes)
            if self._keep is not None:
                self._keep(self.token_bytes, self._prefixes)
        return self._prefixes


class VocabularyCache:
    """Cache of such tables. Nothing about it is an error: a start without it only takes longer."""

    def __init__(self, root: Path | None = None, *, most: int) -> None:
        """`root`: folder of the files, this user's own if it is None; `most`: files that are kept, those that were used
        last; 0: none is kept or read."""
        self._is_on = most > 0
        self._kept = OwnFiles(Path(cache_folder()) / "vocabularies" if root is None else root, ".vocabulary", most)

    def token_tables(self, folder: Path, vocab_size: int, read: Callable[[], TokenBytes | None]) -> TokenTables | None:
        """Return the tables of a folder in a model with `vocab_size` rows: a kept one, or by `read`, which is kept.

        None, and the errors, are those of `read`.
        """
        key = _key(folder, vocab_size) if self._is_on else None
        if key is not None and (data := self._kept.read(key)) is not None and (found := _unpacked(data)) is not None:
            return found
        table = read()
        if table is None:
            return None
        if key is None:
            return TokenTables(table)

        def keep(table: TokenBytes, prefixes: TokenPrefixes) -> None:
            # The files may have changed while they were read.
            if _key(folder, vocab_size) == key:
                self._kept.write(key, _packed(table, prefixes))

        return TokenTables(table, None, keep)


def _key(folder: Path, vocab_size: int) -> str | None:
    """Return the name for what a folder has now; None where nothing is kept, or the folder cannot be read."""
    digest = hashlib.sha256(f"{_FORM} {__version__} {vocab_size}\0".encode())
    try:
        if (folder / _SOURCES[0]).stat().st_size < SMALLEST:
            return None
        for path in (folder / name for name in _SOURCES):
            if path.exists():
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            digest.update(b"\0")
    except OSError:
        return None
    return digest.hexdigest()


def _packed(table: TokenBytes, prefixes: TokenPrefixes) -> bytes:
    """Return a file's content: a line of facts, ends and order as numbers of 32 bits, and all bytes."""
    facts, offsets, buffer = table.parts()
    facts |= {"offsets": len(offsets), "order": len(prefixes.ids)}
    return b"\n".join([json.dumps(facts).encode(), offsets.tobytes() + prefixes.ids.tobytes() + buffer])


def _unpacked(data: bytes) -> TokenTables | None:
    """Return the tables of a file's content; None for the content of something else."""
    line, _, rest = data.partition(b"\n")
    offsets, order = array("I"), array("I")
    try:
        facts = json.loads(line)
        first = offsets.itemsize * facts["offsets"]
        last = first + order.itemsize * facts["order"]
        offsets.frombytes(rest[:first])
        order.frombytes(rest[first:last])
        table = TokenBytes.from_parts(facts, offsets, rest[last:])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return TokenTables(table, TokenPrefixes(table, order))
