"""Zip of a model's tokenizer, which gateways ask a vLLM for."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from penstock.common.errors import FailedPrecondition
from penstock.engines import smg_common_pb2

_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.json",
    "chat_template.jinja",
)
_CHUNK_BYTES = 64 << 10


def pack_tokenizer(folder: Path) -> bytes:
    """Return the zip of a folder's files, in much of a second. Raises FailedPrecondition where there is none."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as files:
        found = [name for name in _NAMES if (folder / name).is_file()]
        for name in found:
            files.write(folder / name, name)
    if not found:
        raise FailedPrecondition("the model has no tokenizer", reason="NO_TOKENIZER")
    return made.getvalue()


def chunks_of(archive: bytes) -> Iterator[smg_common_pb2.GetTokenizerChunk]:
    """Yield the messages; the last has the digest."""
    digest = hashlib.sha256(archive).hexdigest()
    for begin in range(0, len(archive), _CHUNK_BYTES):
        is_last = begin + _CHUNK_BYTES >= len(archive)
        yield smg_common_pb2.GetTokenizerChunk(
            data=archive[begin : begin + _CHUNK_BYTES], sha256=digest if is_last else ""
        )
