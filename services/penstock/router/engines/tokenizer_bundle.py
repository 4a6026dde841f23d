"""Tokenizer's files as another engine sends them (GetTokenizer): what our own backends read from the model's folder."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import tempfile
import zipfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.common.errors import StartupError
from penstock.common.fingerprint import tokenizer_fingerprint
from penstock.common.logging import get_logger
from penstock.generation.options.hf_json import load_defaults
from penstock.generation.options.request_options import ModelDefaults

# Files that tell something here.
_FILES = ("tokenizer.json", "config.json", "generation_config.json")
_log = get_logger("penstock.router")


@dataclass(frozen=True, slots=True)
class BundleFacts:
    """Facts of a model's files: the fingerprint of its tokenizer (empty: it has none), and the model's defaults."""

    fingerprint: str
    defaults: ModelDefaults
    num_layers: int


async def read_bundle(
    chunks: AsyncIterator[Any], max_bytes: int, eos_token_ids: tuple[int, ...], vocab_size: int
) -> BundleFacts:
    """Read the chunks of a zip file of at most `max_bytes`, packed or not.

    `eos_token_ids` count when the files name none. Raises StartupError for files that cannot be read: no request may be
    done by wrong defaults.
    """
    archive, digest = bytearray(), ""
    async for chunk in chunks:
        archive += chunk.data
        digest = chunk.sha256 or digest
        if len(archive) > max_bytes:
            raise _too_large(max_bytes)
    return await asyncio.to_thread(_unpack, bytes(archive), digest, max_bytes, eos_token_ids, vocab_size)


def _unpack(
    archive: bytes, digest: str, max_bytes: int, eos_token_ids: tuple[int, ...], vocab_size: int
) -> BundleFacts:
    if digest and hashlib.sha256(archive).hexdigest() != digest:
        raise StartupError("the backend sent other tokenizer files than it says: the sha256 differs", flag="--backend")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            with zipfile.ZipFile(io.BytesIO(archive)) as files:
                for entry in files.infolist():
                    if entry.filename in _FILES:
                        # The directory may lie about a size: no more is unpacked than is allowed.
                        with files.open(entry) as packed:
                            data = packed.read(max_bytes + 1)
                        if len(data) > max_bytes:
                            raise _too_large(max_bytes)
                        (folder / entry.filename).write_bytes(data)
        except (
            zipfile.BadZipFile,
            zipfile.LargeZipFile,
            RuntimeError,
            OSError,
            EOFError,
        ) as error:
            raise StartupError("the backend's tokenizer files are no zip file", flag="--backend") from error
        num_layers = _num_layers(folder / "config.json")
        defaults, ignored = load_defaults(folder, eos_token_ids, vocab_size, num_layers)
        if ignored:
            _log.warning("generation_config.json asks for what this release does not do", fields=list(ignored))
        return BundleFacts(tokenizer_fingerprint(folder), defaults, num_layers)


def _num_layers(path: Path) -> int:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config = config.get("text_config") or config
        return max(1, int(config.get("num_hidden_layers", 1)))
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return 1


def _too_large(max_bytes: int) -> StartupError:
    return StartupError(
        f"the backend's tokenizer files are larger than {max_bytes} bytes (--max-tokenizer-bytes)",
        flag="--max-tokenizer-bytes",
    )
