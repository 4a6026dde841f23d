"""Fingerprint that shows whether tokenizer and generation belong together."""

from __future__ import annotations

import hashlib
from pathlib import Path


def tokenizer_fingerprint(folder: Path) -> str:
    """Return the lower-case hex sha256 of `tokenizer.json`'s bytes; empty when the folder has none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
